"""A supervisor of a step that ends while its job is being restored."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import supervision
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.errors import CoordinationError


def restoring(tmp_path: Any) -> ProtectedJob:
    """A job whose restore waits for two tasks."""
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    job = ProtectedJob(SimpleNamespace(config=config, node="n2"), "7")  # type: ignore[arg-type]
    job.phase, job.expected = Phase.RESTORING, {"s.0", "s.1"}
    return job


def supervisor(key: str) -> Any:
    step, _, rank = key.partition(".")
    hello = SimpleNamespace(get=lambda _: step, int=lambda _: int(rank))
    return SimpleNamespace(key=key, pid=0, hello=hello)


@pytest.fixture(autouse=True)
def gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_gone(_pid: int) -> None:
        pass

    monkeypatch.setattr(supervision, "wait_gone", wait_gone)


def test_the_attempt_is_given_up_at_once(tmp_path: Any) -> None:
    """Nobody comes in its place: waiting for the full set would take the whole limit."""

    async def run() -> None:
        job = restoring(tmp_path)
        killed = job.supervisors["s.0"] = supervisor("s.0")
        waiting = asyncio.ensure_future(job.all_expected())
        await asyncio.sleep(0)
        await supervision.gone(job, killed)
        with pytest.raises(CoordinationError, match=r"task s\.0 on n2"):
            await asyncio.wait_for(waiting, 10)
        job.phase = Phase.NEW

    asyncio.run(run())


def test_one_that_was_sent_away_harms_no_later_attempt(tmp_path: Any) -> None:
    """The end of its connection is noticed when the next attempt already waits."""

    async def run() -> None:
        job = restoring(tmp_path)
        old = supervisor("s.0")
        job.supervisors = {key: supervisor(key) for key in ("s.0", "s.1")}
        await supervision.gone(job, old)
        await asyncio.wait_for(job.all_expected(), 10)
        job.phase = Phase.NEW

    asyncio.run(run())
