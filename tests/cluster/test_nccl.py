"""NCCL at full speed over several nodes, with a fake NCCL and a fake driver of the GPUs: no card is needed.

The fakes refuse a wrong order: operations that differ between ranks, a communicator after its end, an end with
operations missing, a GPU that is checkpointed without its lock. What only real ones would show: docs/nccl.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LONG, Bench, JobRun, agent_back, arm, bench, fired

from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.init import FAKE_DRIVER
from gpucr_hpc.lab.wait import wait_until

SOURCES = Path(__file__).parents[2] / "spank_plugin"
GEOMETRY = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
ROUNDS = 600
REBUILD = "--checkpoint-nccl=rebuild"
RANK = """
    cd {inside}
    export LD_LIBRARY_PATH={inside}/build/fake/lib
    srun sh -c 'export FAKE_NCCL_HOST=$(hostname) GPUCR_FAKE_GPU={name}-$SLURM_PROCID; {run} >{name}.$SLURM_PROCID'
    echo "status $?"
"""

# All ranks add up what each has, again and again; the last one goes to sleep after some rounds and calls NCCL no more
# before it is told to.
SLEEPER = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "src/nccl/abi.h"
#include "src/nccl/fake/cuda.h"
ncclResult_t ncclGetUniqueId(ncclUniqueId *), ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int),
    ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, cudaStream_t), ncclCommDestroy(ncclComm_t);

int main(int argc, char **argv)
{
    int rank = atoi(argv[1]), ranks = atoi(argv[2]), fd;
    int64_t mine = rank + argc, sum = 0;
    stream_t stream = fake_stream();
    ncclUniqueId id;
    ncclComm_t comm;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (rank == 0) {
        if (ncclGetUniqueId(&id) || (fd = open("id.part", O_WRONLY | O_CREAT, 0600)) < 0 ||
            write(fd, &id, sizeof(id)) != sizeof(id) || rename("id.part", "id"))
            return 2;
    } else {
        while ((fd = open("id", O_RDONLY)) < 0)
            usleep(10000);
        if (read(fd, &id, sizeof(id)) != sizeof(id))
            return 2;
    }
    if (ncclCommInitRank(&comm, ranks, id, rank))
        return 3;
    for (int i = 1; i <= ROUNDS; i++) {
        if (i == 20 && rank == ranks - 1) {
            puts("asleep");
            while (access("awake", F_OK))
                usleep(20000);
        }
        if (ncclAllReduce(&mine, &sum, 1, 4, 0, comm, (cudaStream_t)stream))
            return 4;
        fake_stream_wait(stream);
        mine = sum % 1000003 + rank;
        printf("round %d %lld\n", i, (long long)sum);
        usleep(20000);
    }
    return ncclCommDestroy(comm) ? 5 : 0;
}
"""


@pytest.fixture
def nccl(lab: Lab) -> Iterator[Bench]:
    """A bench with the fakes, on nodes whose agents have a fake driver, whose state all nodes share."""
    on = bench(lab, "nccl")
    shutil.copytree(SOURCES, on.directory / "src", ignore=shutil.ignore_patterns("build"))
    make = ["make", "-s", "-C", f"{on.inside}/src/nccl", f"B={on.inside}/build", f"{on.inside}/build/fake/program"]
    driver = lab.state / "shared/fake-driver"
    shutil.rmtree(driver, ignore_errors=True)
    driver.mkdir()
    lab.exec("n1", make)
    try:
        for node in lab.nodes()[1:]:
            lab.exec(node, ["ln", "-sfn", "/shared/fake-driver", str(FAKE_DRIVER)])
        yield on
    finally:
        lab.cancel_all()
        for node in lab.nodes()[1:]:
            if lab.pid(node) is None:
                lab.start(node)
            lab.exec(node, ["rm", "-f", str(FAKE_DRIVER)])


def submit(on: Bench, name: str, run: str, *options: str) -> JobRun:
    return on.submit(RANK.format(inside=on.inside, name=name, run=run), *GEOMETRY, *options, name=name)


def results(job: JobRun) -> list[list[str]]:
    """What each rank wrote; a file of its own, so that no line of gpucr's is in it."""
    return [job.file(f"{job.name}.{rank}").splitlines() for rank in range(4)]


def progress(job: JobRun, lines: int) -> None:
    """Wait until every rank has written some lines more than now."""
    wanted = [len(one) + lines for one in results(job)]

    def look() -> bool:
        assert not job.over, job.raw[-3000:]
        return all(len(one) >= more for one, more in zip(results(job), wanted, strict=True))

    wait_until(look, 60, f"{lines} more lines of every rank of job {job.id}:\n{job.raw[-2000:]}")


def random_programs(on: Bench, name: str, count: int) -> str:
    (on.directory / f"ids-{name}").mkdir(mode=0o777)
    (on.directory / f"ids-{name}").chmod(0o777)
    return f"exec build/fake/program ids-{name} $SLURM_PROCID 4 1 {count} 20 1"


def build_sleeper(on: Bench) -> None:
    lib = f"-L{on.inside}/build/fake/lib"
    on.compile("sleeper", SLEEPER, f"-I{on.inside}", lib, "-l:libnccl.so.2", "-l:libcuda.so.1", f"-DROUNDS={ROUNDS}")


def test_ranks_on_two_nodes_are_moved_with_their_communicators(nccl: Bench) -> None:
    """Random programs on 2 nodes x 2 ranks: checkpointed, preempted, restored elsewhere, an agent killed at the
    cut (in long tests also later, and another node's); every value that comes out is that of an undisturbed run."""
    job = submit(nccl, "job", random_programs(nccl, "job", 1000000), REBUILD)
    progress(job, 2)
    report = job.checkpoint()
    assert {"quiesce", "give_back"} <= set(report["phases_s"])
    print(report["phases_s"])
    progress(job, 2)
    job.preempt()
    progress(job, 2)
    other = next(node for node in job.lab.hostnames(job.info["nodes"]) if node != job.node)
    deaths = [(Point.QUIET, job.node), (Point.RESUMED, job.node), (Point.CRIU_STARTED, other)]
    for point, node in deaths if LONG else deaths[:1]:
        arm(job, point, nodes=[node])
        job.gpucr("checkpoint", str(job.id), check=False)
        fired(job, node)
        agent_back(job.lab, node)
        progress(job, 2)
    job.move()
    progress(job, 2)
    job.cancel()
    wait_until(lambda: job.over, 60, "the end of the job")
    done = results(job)
    count = min(len(lines) for lines in done)
    plain = submit(nccl, "plain", random_programs(nccl, "plain", count), "--no-checkpoint").end()
    assert results(plain) == [lines[:count] for lines in done]


def sums(count: int) -> list[str]:
    """What each rank of SLEEPER writes."""
    mine, found = [rank + 3 for rank in range(4)], []
    for number in range(1, count + 1):
        total = sum(mine)
        mine = [total % 1000003 + rank for rank in range(4)]
        found.append(f"round {number} {total}")
    return found


def test_a_set_after_which_the_job_went_on(nccl: Bench) -> None:
    """A node is lost: the job goes back to its last checkpoint, though NCCL has come back since, and on from there."""
    build_sleeper(nccl)
    (nccl.directory / "awake").touch()
    job = submit(nccl, "job", "exec ./sleeper $SLURM_PROCID 4", REBUILD)
    progress(job, 5)
    job.checkpoint()
    progress(job, 20)
    lost = job.lab.hostnames(job.info["nodes"])[1]
    job.lab.kill(lost)
    job.running(1, timeout_s=200).says("gpucr: restored on", timeout_s=90)
    assert lost not in job.lab.hostnames(job.info["nodes"])
    job.end()
    assert [[line for line in one if line != "asleep"] for one in results(job)] == [sums(ROUNDS)] * 4


def test_a_rank_that_calls_nccl_no_more(nccl: Bench) -> None:
    """The checkpoint is given up at the time limit, the job runs on, and a later one succeeds."""
    build_sleeper(nccl)
    job = submit(nccl, "job", "exec ./sleeper $SLURM_PROCID 4", REBUILD)
    wait_until(lambda: "asleep" in job.file("job.3"), 60, "the last rank's sleep")
    refused = job.gpucr("checkpoint", str(job.id), check=False)
    assert (77, True) == (refused.status, "did not come to a common point" in refused.stderr)
    (job.directory / "awake").touch()
    job.move()
    job.end()
    rounds = [[line for line in one if line != "asleep"] for one in results(job)]
    assert ROUNDS == len(rounds[0])
    assert rounds == [rounds[0]] * 4


def test_ranks_that_share_a_card_are_refused(nccl: Bench) -> None:
    """Nobody knows yet why such a job failed on a real card: it says so soon after its start, and runs on."""
    build_sleeper(nccl)
    job = submit(nccl, "job", "export FAKE_CARD=$(hostname); exec ./sleeper $SLURM_PROCID 4", REBUILD)
    wait_until(lambda: "asleep" in job.file("job.3"), 60, "the last rank's sleep")
    refused = job.gpucr("checkpoint", str(job.id), check=False)
    assert refused.status != 0
    assert "(--checkpoint-nccl=rebuild): ranks of NCCL share a card" in refused.stderr
    job.says("NOT protected and cannot be moved: sleeper")
    assert "share a card" in job.raw
    (job.directory / "awake").touch()
    job.end()
    assert [[line for line in one if line != "asleep"] for one in results(job)] == [sums(ROUNDS)] * 4


def test_without_the_interposer_it_is_refused(nccl: Bench) -> None:
    """`keep`: ranks that share a node are not protected; the reason names the way to have both."""
    job = submit(nccl, "job", random_programs(nccl, "job", 100), "--checkpoint-nccl=keep")
    progress(job, 2)
    refused = job.gpucr("checkpoint", str(job.id), check=False)
    assert refused.status != 0
    assert "--checkpoint-nccl=rebuild" in refused.stderr
    progress(job, 2)
    job.cancel()
