"""Checkpoints by the clock: every interval, and before the time limit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jobs import LONG, WAYS, JobRun, agent_pid, bench, kill_agent, under
from programs import count

from gpucr_hpc.lab import host
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

ROUNDS = 50 if LONG else 20
_WRITTEN = re.compile(r"gpucr: checkpoint (\S+) written in .*; the job stood still for (\d+\.\d+) s\n")


def written(job: JobRun) -> list[tuple[str, str]]:
    """Checkpoint and freeze in seconds, of each line in the job's output."""
    return _WRITTEN.findall(job.raw)


Footprint = dict[str, set[str]]


def footprint(lab: Lab, job: JobRun) -> Footprint:
    """What must not grow, by name: the agent's descriptors and threads, processes of node and capsule, the capsule's
    descriptors, files of the job."""
    node, known = job.node, host.all_tasks()
    tasks = host.tasks_of(lab.pid(node) or 0, known)
    agent = agent_of(lab, job)
    capsule = [t.pid for t in tasks if t.pid_namespace != known[agent].pid_namespace]
    return {
        "agent_descriptors": _entries(f"/proc/{agent}/fd"),
        "agent_threads": _entries(f"/proc/{agent}/task"),
        "node_processes": {str(t.pid) for t in tasks if t.pid not in capsule},
        "capsule_processes": {str(pid) for pid in capsule},
        "capsule_descriptors": {entry for pid in capsule for entry in _entries(f"/proc/{pid}/fd")},
        "files": {str(path) for path in (lab.root(node) / f"run/gpucr/jobs/{job.id}").rglob("*")},
    }


def agent_of(lab: Lab, job: JobRun) -> int:
    """The agent's process, as the host counts."""
    inside = f"\t{agent_pid(lab, job.node)}\n"
    (agent,) = (t.pid for t in host.tasks_of(lab.pid(job.node) or 0) if _status(t.pid, "NSpid").endswith(inside))
    return agent


def _status(pid: int, key: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines(keepends=True)
    except OSError:
        return ""  # it ended meanwhile
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{key}:")), "").lstrip(" ")


def _entries(path: str) -> set[str]:
    try:
        return {str(entry) for entry in Path(path).iterdir()}
    except OSError:
        return set()


@pytest.mark.parametrize("way", WAYS if LONG else ["plain"])
def test_many_checkpoints_leave_nothing(lab: Lab, way: str) -> None:
    """Neither agent nor capsule grows, the last two sets are kept, and the job loses no line."""
    at = bench(lab, f"clock-many-{way}")
    with under(at, way) as words:
        job = at.submit(count("job", pause=1), "--checkpoint-interval=1s", *words, name="job").says("line 1\n")
        many(lab, job, kill=way == "agent")


def many(lab: Lab, job: JobRun, *, kill: bool) -> None:
    """kill: the agent, so that a second one has been at work from before the first look on."""
    wait_until(lambda: len(written(job)) >= 2, 60, "two checkpoints")
    if kill:
        kill_agent(lab, job.node)
    first, memory = stays(lab, job, 5)
    last, more = stays(lab, job, ROUNDS)
    freezes = sorted(float(seconds) for _, seconds in written(job))
    print(f"{len(freezes)} checkpoints, freeze median {freezes[len(freezes) // 2]} s, longest {freezes[-1]} s")
    print(f"agent: {memory} KiB after 5, {more} KiB after {ROUNDS}")
    assert more - memory <= 2048
    for what in last:
        print(f"{what}: {len(first[what])} after 5, {len(last[what])} after {ROUNDS}")
        assert len(last[what]) <= len(first[what]) + 1, f"{what} that came: {last[what] - first[what]}"
    assert len(job.sets()) in (2, 3)  # a third while the oldest is being removed
    job.whole()


def stays(lab: Lab, job: JobRun, rounds: int) -> tuple[Footprint, int]:
    """The footprint after so many checkpoints, and the agent's memory in KiB: what is there in each of many looks,
    since a checkpoint has things of its own, and so has a process of the job that lives for a moment."""
    wait_until(lambda: len(written(job)) >= rounds, 240, f"{rounds} checkpoints")
    kept, memory = footprint(lab, job), []
    while len(written(job)) < rounds + 3:
        look = footprint(lab, job)
        kept = {what: kept[what] & look[what] for what in kept}
        memory.append(int(_status(agent_of(lab, job), "VmRSS").split()[0]))
    return kept, min(memory)


def test_order_between_those_of_the_clock(lab: Lab) -> None:
    """`gpucr checkpoint` waits for one that is under way and is then taken, or moves the job at once."""
    job = bench(lab, "clock-order").submit(count("job"), "--checkpoint-interval=1s", name="job").says("line 1\n")
    wait_until(lambda: len(written(job)) >= 1, 30, "the first checkpoint")
    for _ in range(8):
        assert job.checkpoint()["reason"] == "demand"
    job.move()
    job.whole()


def test_interval_outlives_the_agent_and_a_move(lab: Lab) -> None:
    """The next checkpoint comes when it would have come: the agent keeps no time of its own."""
    job = bench(lab, "clock-agent").submit(count("job"), "--checkpoint-interval=3s", name="job").says("line 1\n")
    wait_until(lambda: len(written(job)) >= 1, 30, "the first checkpoint")
    kill_agent(lab, job.node)
    wait_until(lambda: len(written(job)) >= 2, 15, "the second checkpoint")
    job.move()
    at = job.raw.rindex("gpucr: restored on")
    (table,) = json.loads(job.gpucr("status", str(job.id), "--json").stdout)["jobs"]
    assert {"began", "bytes_stored"} <= table["last"].keys(), "also before the first checkpoint after a move"
    wait_until(lambda: _WRITTEN.search(job.raw, at), 15, "a checkpoint after the move")
    listed = job.gpucr("list", str(job.id)).stdout
    assert "interval" in listed
    job.whole()


def test_time_limit(lab: Lab) -> None:
    """A job of a one-minute queue goes on after its time; when its rounds are used up a last set is kept."""
    options = ("--checkpoint-on-timeout", "--checkpoint-rounds=1", "--time=1")
    job = bench(lab, "clock-limit").submit(count("job"), *options, name="job", protected=False).says("line 3\n")
    job.back(1, timeout_s=90)
    assert "timeout" in job.gpucr("list", str(job.id)).stdout
    job.says("the time limit comes near, and the job has gone on 1 times", timeout_s=90)
    wait_until(lambda: len(written(job)) == 1, 30, "the last set")
    job.whole()
    assert job.restarts == 1
