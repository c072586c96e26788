"""gpucr drain: a node is emptied without losing work."""

from __future__ import annotations

import json
from typing import Any

from jobs import bench
from programs import count

from gpucr_hpc.lab.cluster import Lab

WAIT = "echo begun; until [ -e go ]; do sleep 0.1; done; echo done"


def drain(lab: Lab, by: str, *argv: str, check: bool = True) -> tuple[int, dict[str, Any]]:
    """`gpucr drain` given at a node; its exit code and report."""
    done = lab.exec(by, ["gpucr", "drain", *argv, "--reason", "test", "--json"], check=check, timeout_s=150)
    return done.status, json.loads(done.stdout)


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
