"""A node loses its power under a protected job: Slurm requeues it, and it goes on from its last good checkpoint."""

from __future__ import annotations

import pytest
from jobs import LONG, WAYS, JobRun, bench, kill_agent, under
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.lab.wait import wait_until


def lose(lab: Lab, job: JobRun, node: str, restarts: int = 1, *, kill: bool = False) -> None:
    """Switch a node of the job off; returns when the job is restored. Earlier words of gpucr are in the tail then.

    kill: also the agent of its new first node, while it restores.
    """
    lab.kill(node)
    job.running(restarts, timeout_s=200)
    if kill:
        kill_agent(lab, job.node)
    job.says("gpucr: restored on", timeout_s=90)
    assert node not in lab.hostnames(job.info["nodes"])


def test_job_of_one_node(lab: Lab) -> None:
    """Twice, from the same checkpoint: what was written after it comes once, the tails are kept beside."""
    job = bench(lab, "lost-node").submit(count("job"), name="job").says("line 3\n")
    job.checkpoint()
    at = len(job.out.splitlines())
    job.says(f"line {at + 5}\n")
    lose(lab, job, job.node)
    job.says(f"line {at + 5}\n")
    lose(lab, job, job.node, 2)
    (job.directory / "job.stop").touch()
    job.end(3)
    lines = job.out.splitlines()
    # job.log, which is closed between two lines, has some twice: what is not open nobody can roll back.
    assert [*(f"line {n}" for n in range(1, len(lines))), f"the last of {len(lines) - 1} lines"] == lines
    tails = sorted(job.directory.glob("job.out.after-*"))
    assert [2, f"line {at + 5}\n" in tails[0].read_text()] == [len(tails), True]


FIRST, SECOND = 0, 1
LOSSES = [(SECOND, "plain")] + ([(FIRST, "plain"), *((SECOND, way) for way in WAYS[1:])] if LONG else [])


@pytest.mark.parametrize(("which", "way"), LOSSES, ids=lambda v: v if isinstance(v, str) else ("first", "second")[v])
def test_mpi_job_loses_one_of_its_nodes(lab: Lab, which: int, way: str) -> None:
    """Ranks that exchange messages all the time come to the result of the undisturbed run."""
    at = bench(lab, f"lost-ring{which}-{way}")
    at.put("ring.c", (CHECKOUT / "examples/ring.c").read_text())
    script = (CHECKOUT / "examples/ring.sh").read_text()
    with under(at, way) as words:
        words += ["--nodes=2", "--ntasks-per-node=2"]
        job = at.submit(script.replace('"$@"', "700 20000").replace("cd ", "cd . #"), *words, name="job")
        job.says("iteration 50 of", timeout_s=90)
        job.checkpoint()
        job.says("iteration 100 of")
        lose(lab, job, lab.hostnames(job.info["nodes"])[which], kill=way == "agent")
        job.end(timeout_s=240)
    lines = [line for line in job.out.splitlines() if line.startswith("iteration")]
    assert [f"iteration {n} of 700" for n in range(0, 700, 50)] == lines
    assert any(line.startswith("RESULT") for line in job.out.splitlines())


def test_nothing_is_there_to_go_on_from(lab: Lab) -> None:
    """Without a checkpoint the job begins again, and says so."""
    job = bench(lab, "lost-early").submit("echo begun; until [ -e go ]; do sleep 0.1; done", name="job").says("begun\n")
    lab.kill(job.node)
    job.says("the job starts from its beginning", timeout_s=100)
    wait_until(lambda: job.out.count("begun\n") == 2, 20, "the second beginning")
    (job.directory / "go").touch()
    job.end()
