"""gpucr drain: a node is emptied without losing work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jobs import LONG, WAYS, Bench, bench, each, kill_agent, under
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.lab.wait import wait_until

RING = 1000  # iterations of 50 ms: on a busy machine a drain takes half a minute
WAIT = "echo begun; until [ -e go ]; do sleep 0.1; done; echo done"


def drain(lab: Lab, by: str, *argv: str, check: bool = True) -> tuple[int, dict[str, Any]]:
    """`gpucr drain` given at a node; its exit code and report."""
    done = lab.exec(by, ["gpucr", "drain", *argv, "--reason", "test", "--json"], check=check, timeout_s=150)
    return done.status, json.loads(done.stdout)


@contextmanager
def only(lab: Lab, *nodes: str) -> Iterator[None]:
    """Jobs that are submitted now start on these nodes, and may go to any later."""
    others = ",".join(node for node in lab.nodes()[1:] if node not in nodes)
    lab.exec("ctl", ["scontrol", "update", f"nodename={others}", "state=drain", "reason=test"])
    yield
    lab.exec("ctl", ["scontrol", "update", f"nodename={others}", "state=resume"])


def states(report: dict[str, Any]) -> dict[str, str]:
    return {job["job"]: job["state"] for job in report["jobs"]}


def test_others_are_waited_for_or_requeued(lab: Lab) -> None:
    """Dry run, deadline, the unprotected job's two ways, and going on after the command gave up."""
    at = bench(lab, "drain-others")
    kept = at.submit(count("kept"), name="kept").says("line 1\n")
    node, other = kept.node, next(name for name in ("n2", "n3") if name != kept.node)
    plain = at.submit(WAIT, "-w", node, name="plain", protected=False).says("begun\n")
    status, report = drain(lab, other, node, "--dry-run")
    assert (status, states(report)) == (0, {str(kept.id): "would move", str(plain.id): "would wait"})
    assert "drain" not in lab.node_states()[node]
    status, report = drain(lab, other, f"n[{node[1:]}]", "--deadline", "12s", check=False)
    assert (status, report["empty"], states(report)) == (75, False, {str(kept.id): "left", str(plain.id): "failed"})
    kept.back(1)
    status, report = drain(lab, node, node, "--others", "requeue", "--deadline", "60s")
    assert (status, report["empty"], states(report)) == (0, True, {str(plain.id): "left"})
    assert lab.node_states()[node] == "drained"
    lab.exec(other, ["gpucr", "undrain", node])
    plain.running(1)
    (at.directory / "go").touch()
    kept.whole()
    plain.end()


def test_one_that_cannot_move_is_named(lab: Lab) -> None:
    """A job that cannot be checkpointed stays, with the reason; a user without the right changes nothing."""
    at = bench(lab, "drain-refused")
    stuck = at.put("stuck.py", STUCK)
    job = at.submit(f"exec python3 {stuck}", name="stuck").says("traced\n")
    done = lab.exec("n2", ["gpucr", "drain", job.node, "--reason", "x"], user="bob", check=False)
    assert done.status == 20
    status, report = drain(lab, job.node, job.node, check=False)
    (left,) = report["jobs"]
    assert (status, left["state"]) == (75, "failed")
    assert "trace" in left["detail"]
    assert not job.over
    job.cancel()


def test_killed_in_the_middle_and_given_again(lab: Lab) -> None:
    """The second command deals with what the first has left; what an agent had begun is not done twice."""
    at = bench(lab, "drain-killed")
    with only(lab, "n1"):
        jobs = [at.submit(count(name), name=name).says("line 1\n") for name in ("one", "two")]
    script = "echo $$ >/run/drain.pid; exec gpucr drain n1 --reason test --parallel 1"
    command = subprocess.Popen(lab.exec_argv("n2", ["sh", "-c", script]), stdout=subprocess.DEVNULL)
    wait_until(lambda: any("the job leaves n1" in job.raw for job in jobs), 60, "the first to leave")
    lab.exec("n2", ["sh", "-c", "kill -9 $(cat /run/drain.pid)"])
    assert command.wait(30) != 0
    assert "drain" in lab.node_states()["n1"]
    status, report = drain(lab, "n3", "n1", "--deadline", "60s")
    assert (status, report["empty"]) == (0, True)
    for job in jobs:
        job.back(1).whole()
        assert (job.restarts, job.raw.count("the job leaves n1")) == (1, 1)


def test_batches(lab: Lab) -> None:
    """One node after the other is emptied, worked on while nothing runs there, and given back."""
    at = bench(lab, "drain-batches")
    jobs = []
    for node in ("n1", "n2"):
        with only(lab, node):
            jobs.append(at.submit(count(node), name=node).says("line 1\n"))
    work = f"squeue --noheader --states=running --nodelist=$NODES >>{at.inside}/seen; echo $NODES >>{at.inside}/done"
    status, report = drain(lab, "n3", "n[1-2]", "--batch", "1", "--deadline", "100s", "--then", work)
    assert (status, report["empty"]) == (0, True)
    assert [(at.directory / name).read_text() for name in ("done", "seen")] == ["n1\nn2\n", ""]
    assert not {"drain", "drained"} & {lab.node_states()[node] for node in ("n1", "n2")}
    for job in jobs:
        job.back(1).whole()


@pytest.mark.skipif(not LONG, reason="a minute more: GPUCR_TEST_LONG=1; also in scripts/demo --drain")
@pytest.mark.parametrize("way", WAYS)
def test_a_node_with_six_protected_jobs_and_another(lab: Lab, way: str) -> None:
    """Two MPI jobs of two nodes among them: the node is empty before the deadline, and every result is right."""
    at = bench(lab, f"drain-seven-{way}")
    at.put("ring.c", (CHECKOUT / "examples/ring.c").read_text())
    ring = (CHECKOUT / "examples/ring.sh").read_text().replace('"$@"', f"{RING} 50000").replace("cd ", "cd . #")
    with under(at, way) as words:  # first, since a new slurm.conf takes back what was said of the partition
        lab.exec("ctl", ["scontrol", "update", "partitionname=low", "oversubscribe=force:4"])
        try:
            seven_jobs(lab, at, ring, words, kill=way == "agent")
        finally:
            lab.exec("ctl", ["scontrol", "update", "partitionname=low", "oversubscribe=no"])


def seven_jobs(lab: Lab, at: Bench, ring: str, words: list[str], *, kill: bool) -> None:
    """words: options of sbatch for all. kill: the agent of the node, under the command."""
    with only(lab, "n1", "n2"):
        two = ("-N", "2", "-n", "2", "--ntasks-per-node=1")
        rings = [at.submit(ring, *two, *words, name=f"ring{n}").running() for n in range(2)]
    with only(lab, "n1"):
        singles = [at.submit(count(f"one{n}"), *words, name=f"one{n}").says("line 1\n") for n in range(4)]
        plain = at.submit(WAIT, *words, name="plain", protected=False).says("begun\n")
    for job in rings:
        job.says("iteration 50 of", timeout_s=120)
    for job in [*rings, *singles, plain]:
        assert "n1" in lab.hostnames(job.info["nodes"])
    options = ("--others", "requeue", "--deadline", "120s")
    orders = [lambda: drain(lab, "n3", "n1", *options), *([lambda: kill_agent(lab, "n1")] if kill else [])]
    status, report = each(orders)[0]
    assert (status, report["empty"], report["took_s"] < 120) == (0, True, True)
    assert states(report) == {str(job.id): "left" for job in [*rings, *singles, plain]}
    assert lab.node_states()["n1"] == "drained"
    assert json.loads(lab.exec("n3", ["gpucr", "undrain", "n1", "--json"]).stdout)["nodes"] == ["n1"]
    for job in singles:
        job.back(1, timeout_s=120).whole()
    for job in rings:
        job.back(1, timeout_s=120).end(timeout_s=200)
        lines = [line for line in job.out.splitlines() if line.startswith("iteration")]
        assert lines == [f"iteration {n} of {RING}" for n in range(0, RING, 50)]
    assert len({line for job in rings for line in job.out.splitlines() if line.startswith("RESULT")}) == 1
    (at.directory / "go").touch()
    plain.end()


# A child that its parent traces: a debugger.
STUCK = """
    import ctypes, os, time
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(16, child, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(child, 0)
    libc.ptrace(7, child, None, None)
    print("traced", flush=True)
    time.sleep(1000)
"""
