"""What is asked of slurmctld about the nodes of a requeued job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from gpucr_hpc.errors import RequeueFailed
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
    is_het=False,
    requeueable=True,
)


@pytest.mark.parametrize(
    ("info", "asked"),
    [
        (PENDING, True),
        (replace(PENDING, restarts=4), False),
        (replace(PENDING, states=frozenset({"RUNNING"})), False),
        (replace(PENDING, excluded_nodes="n9"), False),
    ],
    ids=["still waits", "was moved again", "runs", "excludes nothing of ours"],
)
def test_a_job_is_forgiven_for_its_own_move_only(monkeypatch, info: query.JobInfo, asked: bool):
    """A wish that belongs to a later move stays; the user's own exclusion always does."""
    calls: list[Sequence[str]] = []

    async def job(_job: str) -> query.JobInfo:
        return info

    async def run(argv: Sequence[str], **_: object) -> Result:
        calls.append(argv)
        return Result(tuple(argv), 0, "", "", 0.0)

    monkeypatch.setattr(control, "_AWAY_S", 0.0)
    monkeypatch.setattr(control.query, "job", job)
    monkeypatch.setattr(control, "run_async", run)
    asyncio.run(control.forgive("7", "n9", 3))
    assert calls == ([["scontrol", "update", "JobId=7", "ExcNodeList=n9"]] if asked else [])


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
