"""kill -9 of every part of a job of two nodes at every numbered point of a checkpoint and a restore.

The job is a batch script with a step whose two ranks exchange checked blocks. It has one set from before the fault.
Whatever is killed, in the end every turn of every rank is there once and in order, and nothing is left on any node.

Here a choice of victims and points is run; with GPUCR_TEST_LONG=1 every victim meets every point.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faultcases import BACK, FAILED, HELD, ON, STEP_KILLED, Case, cases, kill
from jobs import LONG, agent_back, bench, disarm, each

from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab

VICTIMS = (
    *("agent-lead", "agent-other", "supervisor-lead", "supervisor-other", "init-lead", "init-other"),
    *("slurmd-lead", "slurmd-other", "node-lead", "node-other"),
)
POINTS = [p for p in Point if "GPU" not in p.state and p is not Point.RESUMED]  # the job is moved
_IN_TIME = list(Point)
_TOGETHER = 3  # jobs of one test

# What continuous integration runs of the whole.
CHOICE = {
    "agent-lead": [Point.COMMITTED, Point.STEPS_STARTED, Point.UNLOCKED],
    "supervisor-other": [Point.LOCKED, Point.COMMITTED, Point.ALL_RESTORED],
    "init-other": [Point.LOCKED, Point.REQUEUED, Point.RESTORED],
    "node-lead": [Point.FROZEN, Point.REQUEUED],
}


def possible(victim: str, point: Point) -> bool:
    """Whether there is such a process at this point."""
    if victim.startswith("init"):
        return point not in (Point.ENDED, Point.CHECKED)
    if victim == "supervisor-other":
        return point not in (Point.CHECKED, Point.BUILT)
    return True


def expected(victim: str, point: Point) -> set[str]:
    """How a job may come through."""
    what = victim.partition("-")[0]
    at, later = _IN_TIME.index(point), (Point.COMMITTED, Point.REQUEUED, Point.CHECKED)
    committed, gone, back = (at >= _IN_TIME.index(p) for p in later)
    if victim == "slurmd-lead" and gone and not back:
        # One that is started anew takes the requeued job for its former run: Slurm holds the job (docs/admin.md).
        return {BACK, HELD}
    if what in ("node", "slurmd") or (gone and not back):
        return {BACK}
    if what == "agent":
        return {BACK} if back else {ON}
    if what == "init" and committed:
        return {BACK, FAILED, HELD} if back else {BACK, FAILED}
    if victim == "supervisor-other":
        return {BACK, STEP_KILLED}
    # Slurm learns of the killed task about when the checkpoint goes on: it may be committed before.
    # The image is whole from "frozen" on, whoever dies then.
    return {FAILED} if back else {BACK, FAILED}


def batches() -> Iterator[tuple[str, list[Point]]]:
    """Victim and points of one test."""
    for victim in VICTIMS:
        points = [p for p in (POINTS if LONG else CHOICE.get(victim, [])) if possible(victim, p)]
        size = 2 if victim.startswith("node") else _TOGETHER
        for begin in range(0, len(points), size):
            yield victim, points[begin : begin + size]


def shown(value: object) -> str:
    return "+".join(str(p.number) for p in value) if isinstance(value, list) else str(value)


def strike(lab: Lab, victim: str, all_cases: list[Case]) -> set[str]:
    """Kill every case's victim, a daemon that several have in common once; nodes whose agent is to come back."""
    what, nodes = victim.partition("-")[0], {case.node for case in all_cases}
    if what not in ("agent", "slurmd"):
        for case in all_cases:
            kill(lab, case)
        return set()
    for node in nodes:
        lab.exec(node, ["kill", "-KILL", str(lab.daemons(node)[what])])
    return nodes if what == "agent" else set()


@pytest.mark.parametrize(("victim", "points"), list(batches()), ids=shown)
def test_killed(lab: Lab, victim: str, points: list[Point]) -> None:
    """Nothing is lost, nothing runs twice, nothing is left."""
    on = bench(lab, "faults")
    all_cases = cases(on, victim, points)
    each([case.begin for case in all_cases])
    try:
        each([case.reach for case in all_cases])
        agents = strike(lab, victim, all_cases)
    finally:
        for case in all_cases:
            disarm(case.job)
    for node in agents:
        agent_back(lab, node)
    ways = dict(zip(points, each([case.settle for case in all_cases]), strict=True))
    assert {p.label: how for p, how in ways.items() if how not in expected(victim, p)} == {}
    each([lambda case=case: case.whole(ways[case.point]) for case in all_cases])
