"""The agent dies at every point of a checkpoint and of a restore: the job is neither lost nor run twice."""

from __future__ import annotations

import pytest
from jobs import agent_back, agent_pid, arm, bench, disarm, fired, kill_agent, take
from programs import count

from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab

POINTS = [p for p in Point if p.number <= Point.ENDED.number and "GPU" not in p.state]
BACK = [p for p in Point if p.number >= Point.CHECKED.number and "GPU" not in p.state]


def shown(points: Point | list[Point]) -> str:
    return "+".join(p.label for p in (points if isinstance(points, list) else [points]))


@pytest.mark.parametrize("points", [POINTS[:3], POINTS[3:6], POINTS[6:]], ids=shown)
def test_killed_in_a_checkpoint_on_demand(lab: Lab, points: list[Point]) -> None:
    """Nothing is lost or doubled: the job goes on here or, once requeued, elsewhere; a later checkpoint works."""
    on = bench(lab, "death-demand")
    names = {point: point.label.replace(" ", "-") for point in points}
    jobs = {p: on.submit(count(name), "-c", "2", name=name) for p, name in names.items()}
    nodes = {}
    for point, job in jobs.items():
        job.says("line 5\n")
        nodes[point] = job.node
        arm(job, point, nodes=[nodes[point]])
        asked = job.gpucr("checkpoint", str(job.id), "--requeue", check=False)
        assert "closed the connection" in asked.stderr
    for point, job in jobs.items():
        if point in (Point.REQUEUED, Point.ENDED):
            job.back(1)
        else:
            agent_back(lab, nodes[point])
            assert (job.restarts, len(job.sets())) == (0, int(point in (Point.COMMITTED, Point.MARKED)))
    for job in jobs.values():
        job.move()
    for job in jobs.values():
        job.whole()


@pytest.mark.parametrize("point", [Point.FROZEN, Point.COMMITTED, Point.REQUEUED], ids=shown)
def test_killed_in_a_preemption(lab: Lab, point: Point) -> None:
    """A preemption is told once; the agent that comes next takes it up again within the grace time."""
    on = bench(lab, "death-preempted")
    job = on.submit(count("job"), name="job").says("line 5\n")
    node = job.node
    arm(job, point, nodes=[node])
    high = take(lab, node)
    fired(job, node)
    job.back(1)
    assert job.node != node
    lab.exec("ctl", ["scancel", str(high)])
    job.whole()


@pytest.mark.parametrize("point", BACK, ids=shown)
def test_killed_in_a_restore(lab: Lab, point: Point) -> None:
    """The tree that CRIU has brought back is taken over, else it is restored once more; never both."""
    on = bench(lab, "death-restore")
    job = on.submit(count("job"), name="job").says("line 5\n")
    arm(job, point, nodes=lab.nodes()[1:])
    job.checkpoint("--requeue")
    job.running(1)
    fired(job, job.node)
    disarm(job)
    job.whole()
    assert job.restarts == 1


def test_agent_restarts_while_jobs_run(lab: Lab) -> None:
    """kill -9 and a plain restart disturb nobody; a preemption after it works as ever."""
    on = bench(lab, "death-idle")
    kill, term = (on.submit(count(name), "-c", "2", name=name) for name in ("kill", "term"))
    ended = on.submit("echo before; sleep 3; echo after; exit 5", "-c", "2", name="ended").says("before\n")
    lab.exec(ended.node, ["kill", "-STOP", str(agent_pid(lab, ended.node))])
    for job, signal in ((kill, "KILL"), (term, "TERM")):
        kill_agent(lab, job.says("line 3\n").node, signal)
    node = ended.node
    ended.end(5)  # without an agent that answers
    kill_agent(lab, node)
    assert ended.out == "before\nafter\n"
    assert (kill.restarts, term.restarts) == (0, 0)
    kill.preempt()
    term.move()
    kill.whole()
    term.whole()
