"""sbatch --restore-from: a new job goes on from a checkpoint of another one."""

from __future__ import annotations

import re

import pytest
from jobs import LONG, Bench, JobRun, bench
from programs import PAIR, count, pair

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

# What it writes to stays closed between two lines, so two of it do not have the same file open.
WORK = """
    for ((i = 1; ; i++)); do
        echo "line $i of $SLURM_JOB_ID"
        [ -e "$0.never" -o -e stop ] && break
        sleep 0.1
    done
    srun echo "a step of $SLURM_JOB_ID"
    exit 3
"""


def clone(at: Bench, checkpoint: str, *options: str, name: str) -> JobRun:
    """A job from a checkpoint; its own script would say so."""
    return at.submit("echo WRONG SCRIPT", f"--restore-from={checkpoint}", *options, name=name, protected=False)


def refused(job: JobRun, reason: str, code: int) -> None:
    """It ends at once with the reason, and nothing of either script has run."""
    job.end(code)
    assert reason in job.raw
    assert job.out == ""


def test_while_the_first_runs_and_after(lab: Lab) -> None:
    """Two jobs from one set, beside the first and after its end; each has every line from the set on, also if moved."""
    at = bench(lab, "clone")
    first = at.submit(WORK, name="first").says("line 3 of")
    checkpoint = first.checkpoint()["checkpoint"]
    # The job goes on while its memory is being sealed: the set is of a moment before the word of it.
    most = first.raw[: first.raw.index("gpucr: checkpoint")].count("line ")
    second = clone(at, checkpoint, name="second").back(1)
    assert f"what goes on began as job {first.id}: " in second.raw
    assert f"of job {first.id} on " in second.raw
    second.says(f"line {most + 3} of {first.id}\n")
    begin = int(re.findall(r"^line (\d+) of", second.out, re.M)[0])
    assert 3 < begin <= most + 1
    moved = second.checkpoint("--requeue")["checkpoint"]
    second.back(2).says(f"line {len(second.out.splitlines()) + begin + 5} of")
    assert [moved] == second.sets()
    (at.directory / "stop").touch()
    for job, number in ((first, 1), (second, begin)):
        job.end(3)
        last = job.out.splitlines()
        wanted = [f"line {n} of {first.id}" for n in range(number, number + len(last) - 1)]
        assert [*wanted, f"a step of {first.id}"] == last
    # After the first has ended, too: its last set is there, since it ended with an error.
    third = clone(at, checkpoint, name="third")
    third.end(3)
    assert third.out.splitlines()[-1] == f"a step of {first.id}"


@pytest.mark.skipif(not LONG, reason="a minute more: GPUCR_TEST_LONG=1")
def test_node_failure_before_it_has_a_set_of_its_own(lab: Lab) -> None:
    """It begins with the same set again, and its output has each line once."""
    at = bench(lab, "clone-lost")
    first = at.submit(WORK, name="first").says("line 3 of")
    checkpoint = first.checkpoint("--stop")["checkpoint"]
    first.cancel()
    second = clone(at, checkpoint, name="second").back(1)
    wait_until(lambda: second.out.count("\n") > 5, 30, "five lines")
    lab.kill(second.node)
    second.running(1, timeout_s=200).says("gpucr: restored on", timeout_s=30)
    wait_until(lambda: second.out.count("\n") > 8, 30, "eight lines")
    (at.directory / "stop").touch()
    second.end(3)
    numbers = [int(n) for n in re.findall(r"^line (\d+) of", second.out, re.M)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_two_nodes_with_a_step(lab: Lab) -> None:
    """Both ranks of a step come back as a step of the new job; the wrong number of nodes or tasks is refused."""
    at = bench(lab, "clone-pair")
    at.put("pair.py", PAIR)
    words = ("-N", "2", "-n", "2")
    first = at.submit(pair("job"), *words, name="first").says("rank 1 turn 3\n")
    checkpoint = first.checkpoint("--stop")["checkpoint"]
    first.cancel()
    wait_until(lambda: first.over, 60, "the end of the first")
    refused(clone(at, checkpoint, name="one"), "made with 2 nodes, this job has 1: use --nodes=2", 45)
    refused(clone(at, checkpoint, "-N", "2", "-n", "4", name="four"), "made with 2 tasks, this job has 4", 45)
    second = clone(at, checkpoint, *words, name="second").back(1)
    assert f"writes to {at.inside}/job.0 and 1 more of job {first.id}" in second.raw
    wait_until(lambda: second.out.count("rank 1 turn") > 5, 30, "five turns")
    third = clone(at, checkpoint, *words, name="third")
    refused(third, f"job {second.id} is not over and writes to {at.inside}/job.0 and 1 more, too", 45)
    (at.directory / "job.stop").touch()
    second.end(3)
    assert {"rank 0 good", "rank 1 good", "status 0"} <= set(second.out.splitlines())
    for rank in range(2):
        numbers = list(map(int, at.directory.joinpath(f"job.{rank}").read_text().split()))
        assert numbers == list(range(1, len(numbers) + 1))


def test_what_is_refused(lab: Lab) -> None:
    """Another user's set, none at all, a damaged one, and a job that still writes to the same files."""
    at = bench(lab, "clone-refused")
    first = at.submit(count("job"), name="first").says("line 3\n")
    open_file = at.submit("exec 3>>own.txt; until [ -e job.stop ]; do echo x >&3; sleep 0.1; done", name="open")
    wait_until(lambda: "x" in open_file.file("own.txt"), 30, "the file")
    checkpoint = first.checkpoint()["checkpoint"]
    writing = open_file.checkpoint()["checkpoint"]
    other = bench(lab, "clone-foreign", "bob")
    refused(clone(other, checkpoint, name="foreign"), f"no checkpoint {checkpoint} of uid", 62)
    refused(clone(at, "20200101T000000Z-0000", name="missing"), "no checkpoint 20200101T000000Z-0000 of uid", 62)
    refused(clone(at, writing, name="both"), f"job {open_file.id} is not over and writes to {at.inside}/own.txt", 45)
    files = [path for path in (first.store() / checkpoint).iterdir() if path.name != "manifest"]
    pack = max(files, key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.truncate(pack.stat().st_size - 1)
    refused(clone(at, checkpoint, name="damaged"), f"checkpoint {checkpoint} is not restored", 52)
    (first.store() / checkpoint / "manifest").write_bytes(b"x" * 500)
    refused(clone(at, checkpoint, name="no-manifest"), "does not begin with the magic", 52)
    (at.directory / "job.stop").touch()
    open_file.end()
    first.end(3)


def signal(job: JobRun) -> None:
    """Only this job's batch script gets it, whatever it shares with others."""
    job.lab.exec("ctl", ["scancel", "--batch", "--signal=USR1", str(job.id)], user=job.user)


def test_what_it_began_with_stays_until_it_has_its_own(lab: Lab) -> None:
    """The first job ends well, which removes its sets, but for this one; nor does `gpucr prune` reach it."""
    at = bench(lab, "clone-kept")
    script = "trap 'exit 0' USR1; for ((i = 1; ; i++)); do echo line $i; sleep 0.1 & wait $!; done"
    first = at.submit(script, name="first").says("line 3\n")
    checkpoint = first.checkpoint()["checkpoint"]
    second = clone(at, checkpoint, name="second").back(1)
    first.checkpoint()
    signal(first)
    first.end(0)
    assert [checkpoint] == first.sets()
    pruned = first.gpucr("prune", str(first.id), "--keep-last", "0").stdout
    assert (pruned, [checkpoint]) == ("0 removed, 1 kept, 0 B\n", first.sets())
    own = second.checkpoint()["checkpoint"]
    assert ([], [own]) == (first.sets(), second.sets())
    second.move()
    signal(second)
    second.end(0)
    assert [] == second.sets()


def test_two_at_once(lab: Lab) -> None:
    """Both find the same files open for writing in the set: one goes on, the other is told of it."""
    at = bench(lab, "clone-twice")
    first = at.submit("exec 3>>own.txt; until [ -e stop ]; do echo x >&3; sleep 0.1; done", name="first")
    wait_until(lambda: "x" in first.file("own.txt"), 30, "the file")
    checkpoint = first.checkpoint("--stop")["checkpoint"]
    first.cancel()
    wait_until(lambda: first.over, 60, "the end of the first")
    both = [clone(at, checkpoint, name=name) for name in ("one", "two")]
    wait_until(lambda: any(job.over for job in both), 60, "the end of one")
    (lost,), (won,) = ([job for job in both if job.over is over] for over in (True, False))
    refused(lost, f"job {won.id} is not over and writes to {at.inside}/own.txt, too", 45)
    won.back(1)
    (at.directory / "stop").touch()
    won.end()
