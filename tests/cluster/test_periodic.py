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


def footprint(lab: Lab, job: JobRun) -> dict[str, int]:
    """What must not grow: the agent's memory (KiB), descriptors and threads, processes of node and capsule, the
    capsule's descriptors, files of the job."""
    node, known = job.node, host.all_tasks()
    tasks = host.tasks_of(lab.pid(node) or 0, known)
    inside = f"\t{agent_pid(lab, node)}\n"
    (agent,) = (t.pid for t in tasks if _status(t.pid, "NSpid").endswith(inside))
    capsule = [t.pid for t in tasks if t.pid_namespace != known[agent].pid_namespace]
    return {
        "agent_kib": int(_status(agent, "VmRSS").split()[0]),
        "agent_descriptors": _entries(f"/proc/{agent}/fd"),
        "agent_threads": _entries(f"/proc/{agent}/task"),
        "node_processes": len(tasks) - len(capsule),
        "capsule_processes": len(capsule),
        "capsule_descriptors": sum(_entries(f"/proc/{pid}/fd") for pid in capsule),
        "files": sum(1 for _ in (lab.root(node) / f"run/gpucr/jobs/{job.id}").rglob("*")),
    }


def _status(pid: int, key: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines(keepends=True)
    except OSError:
        return ""  # it ended meanwhile
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{key}:")), "").lstrip(" ")


def _entries(path: str) -> int:
    try:
        return len(list(Path(path).iterdir()))
    except OSError:
        return 0


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
    first = least(lab, job, 5)
    last = least(lab, job, ROUNDS)
    freezes = sorted(float(seconds) for _, seconds in written(job))
    print(f"{len(freezes)} checkpoints, freeze median {freezes[len(freezes) // 2]} s, longest {freezes[-1]} s")
    print(f"after 5:  {first}\nafter {ROUNDS}: {last}")
    grown = {key: last[key] - first[key] for key in last}
    assert grown.pop("agent_kib") <= 2048
    assert {key: more for key, more in grown.items() if more > 1} == {}  # one may be under way in every look
    assert len(job.sets()) in (2, 3)  # a third while the oldest is being removed
    job.whole()


def least(lab: Lab, job: JobRun, rounds: int) -> dict[str, int]:
    """The footprint after so many checkpoints: the least of many looks, since during a checkpoint there is more."""
    wait_until(lambda: len(written(job)) >= rounds, 240, f"{rounds} checkpoints")
    looks = []
    while len(written(job)) < rounds + 3:
        looks.append(footprint(lab, job))
    return {key: min(look[key] for look in looks) for key in looks[0]}


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
