"""Nodes that cannot hear each other, agents that hang or never come back, a slurmctld that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from faultcases import cases
from jobs import LONG, agent_back, arm, bench, disarm, each, stopped_at
from programs import count

from gpucr_hpc.faults import Point
from gpucr_hpc.lab import conf
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

_WALL = """
table ip lab_wall {
  chain in { type filter hook input priority -300; ip saddr %s drop; }
  chain out { type filter hook output priority -300; ip daddr %s drop; }
}
"""


@contextmanager
def wall(lab: Lab, nodes: tuple[str, ...]) -> Iterator[None]:
    """No packet passes between two nodes, in either direction; each still hears slurmctld."""
    a, b = nodes
    for node, other in ((a, b), (b, a)):
        address = conf.address(other)
        lab.exec(node, ["nft", "-f", "-"], stdin=_WALL % (address, address))
    try:
        yield
    finally:
        for node in nodes:
            lab.exec(node, ["nft", "delete", "table", "ip", "lab_wall"])


@contextmanager
def hung(lab: Lab, nodes: tuple[str, ...]) -> Iterator[None]:
    """The second node's agent is stopped."""
    pid = str(lab.daemons(nodes[1])["agent"])
    lab.exec(nodes[1], ["kill", "-STOP", pid])
    try:
        yield
    finally:
        lab.exec(nodes[1], ["kill", "-CONT", pid])


TROUBLES = [(wall, Point.FROZEN), (hung, Point.RESTORED)]
if LONG:
    TROUBLES += [(hung, Point.FROZEN), (wall, Point.RESTORED)]


@pytest.mark.parametrize(("trouble", "point"), TROUBLES, ids=lambda v: getattr(v, "label", None) or v.__name__)
def test_nodes_that_lose_each_other(lab: Lab, trouble: Callable[..., Iterator[None]], point: Point) -> None:
    """A checkpoint is given up within its time and the job runs on; a restore is tried again until it succeeds."""
    (case,) = cases(bench(lab, "contact"), "agent-other", [point])
    case.begin()
    case.reach()
    with trouble(lab, case.nodes):
        disarm(case.job)
        wait_until(lambda: "is lost: " in case.job.raw, 60, f"the lead to notice:\n{case.job.raw[-500:]}")
    assert case.settle() == ("runs on" if point is Point.FROZEN else "restored")
    case.whole()


def test_slurmctld_is_away_while_a_job_restarts(lab: Lab) -> None:
    """The job waits for it; it neither begins again nor fails."""
    job = bench(lab, "contact").submit(count("job"), name="job").says("line 5\n")
    arm(job, Point.CHECKED, "stop", nodes=lab.nodes()[1:])
    job.checkpoint("--requeue")
    job.running(1)
    node = job.node
    stopped_at(job, node)
    slurmctld = str(lab.daemons("ctl")["slurmctld"])
    lab.exec("ctl", ["kill", "-STOP", slurmctld])
    try:
        lab.exec(node, ["kill", "-KILL", str(lab.daemons(node)["agent"])])  # the next one has to ask
        (lab.root(node) / f"run/lab/faults/{job.id}.at").unlink(missing_ok=True)
        wait_until(lambda: "slurmctld does not answer" in job.raw, 60, "the word that the job waits")
    finally:
        lab.exec("ctl", ["kill", "-CONT", slurmctld])
    disarm(job)
    job.back(1).whole()
    assert job.restarts == 1


def test_an_agent_that_never_comes_back_after_a_requeue(lab: Lab) -> None:
    """The frozen tree does not keep its node until KillWait is over; the job goes on elsewhere from the new set.

    The node is drained, as a site's health check does with a node whose agent is down.
    """
    job = bench(lab, "contact").submit(count("job"), name="job").says("line 5\n")
    node = job.node
    path = lab.root(node) / "etc/gpucr/gpucr.toml"
    before = path.read_text()
    arm(job, Point.REQUEUED, "stop", nodes=[node])
    order = Thread(target=job.gpucr, args=("checkpoint", str(job.id), "--requeue"), kwargs={"check": False})
    order.start()
    stopped_at(job, node)
    path.write_text("broken = [")
    try:
        lab.exec(node, ["kill", "-KILL", str(lab.daemons(node)["agent"])])
        order.join()
        lab.exec("ctl", ["scontrol", "update", f"nodename={node}", "state=drain", "reason=agent"])
        disarm(job)
        job.back(1)
        assert "which stands still: it ends here" in job.raw
        assert job.node != node
    finally:
        path.write_text(before)
        agent_back(lab, node)
    job.whole()


def test_two_jobs_of_the_same_nodes_do_not_meet(lab: Lab) -> None:
    """The same virtual addresses and ports on the same nodes, before and after a move."""
    both = cases(bench(lab, "contact"), "agent-other", [Point.FROZEN, Point.CAPTURED])
    each([case.begin for case in both])
    assert both[0].nodes == both[1].nodes
    each([case.job.move for case in both])
    each([case.whole for case in both])
