"""What is asked of slurmctld about the nodes of a requeued job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from gpucr_hpc.errors import JobUnknown, RequeueFailed, SlurmError
from gpucr_hpc.proc import Result
from gpucr_hpc.slurm import control, query

PENDING = query.JobInfo(
    job="7",
    uid=1,
    states=frozenset({"PENDING"}),
    nodes="",
    node_count=1,
    batch_host="",
    partition="low",
    restarts=3,
    preempt_time=0,
    end_time=0,
    excluded_nodes="n9,n1",
    required_nodes="",
    cpus=1,
    tasks=1,
    is_het=False,
    requeueable=True,
)


RUNNING = replace(PENDING, states=frozenset({"RUNNING"}))
MOVED_AGAIN = replace(PENDING, restarts=4, excluded_nodes="n9,n2")
AWAY = SlurmError(reason="no answer")


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([PENDING], True),
        ([replace(PENDING, restarts=4)], False),
        ([replace(PENDING, excluded_nodes="n9")], False),
        ([RUNNING, RUNNING, replace(PENDING, restarts=4)], True),
        ([RUNNING, AWAY, replace(PENDING, restarts=4)], True),
        ([RUNNING, MOVED_AGAIN], False),
        ([RUNNING, replace(RUNNING, states=frozenset({"COMPLETED"}))], False),
        ([RUNNING, JobUnknown(job="7")], False),
    ],
    ids=[
        *("still waits", "was moved again", "excludes nothing of ours", "lost its node", "slurmctld was away"),
        *("ran and was moved again", "ended", "ended long ago"),
    ],
)
def test_a_job_is_forgiven_for_its_own_move_only(monkeypatch, answers: list[query.JobInfo | SlurmError], asked: bool):
    """A wish that belongs to a later move stays; the user's own exclusion always does. One that ran elsewhere and
    waits again may need the node that it left."""
    calls: list[Sequence[str]] = []

    async def job(_job: str) -> query.JobInfo:
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    async def run(argv: Sequence[str], **_: object) -> Result:
        calls.append(argv)
        return Result(tuple(argv), 0, "", "", 0.0)

    monkeypatch.setattr(control, "_AWAY_S", 0.0)
    monkeypatch.setattr(control, "_LOOK_S", 0.0)
    monkeypatch.setattr(control.query, "job", job)
    monkeypatch.setattr(control, "run_async", run)
    asyncio.run(control.forgive("7", "n9", 3))
    assert calls == ([["scontrol", "update", "JobId=7", "ExcNodeList=n9"]] if asked else [])
    assert answers == []


@pytest.mark.parametrize(
    ("states", "asked", "error"),
    [
        ({"RUNNING"}, True, ""),
        ({"PENDING", "COMPLETING"}, False, ""),
        ({"CANCELLED", "COMPLETING"}, False, "CANCELLED"),
        ({"FAILED"}, False, "FAILED"),
    ],
    ids=["runs", "is requeued already", "was cancelled", "has failed"],
)
def test_only_a_running_job_is_requeued(monkeypatch, states: set[str], asked: bool, error: str):
    """slurmctld would requeue a job that has ended: one that its user cancelled meanwhile must not come back."""
    calls: list[Sequence[str]] = []

    async def job(_job: str) -> query.JobInfo:
        return replace(PENDING, states=frozenset(states))

    async def run(argv: Sequence[str], **_: object) -> Result:
        calls.append(argv)
        return Result(tuple(argv), 0, "", "", 0.0)

    monkeypatch.setattr(control.query, "job", job)
    monkeypatch.setattr(control, "run_async", run)
    with pytest.raises(RequeueFailed, match=error) if error else nullcontext():
        asyncio.run(control.requeue("7"))
    assert calls == ([["scontrol", "requeue", "7"]] if asked else [])
