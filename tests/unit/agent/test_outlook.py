"""What would stand against a checkpoint is said while there is time, once, and not when it goes away by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import outlook
from gpucr_hpc.agent.clock import Times
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.config import EngineConfig
from gpucr_hpc.engine.preflight import Finding

RING = Finding(7, "node", "descriptor 4 is an io_uring ring")
SAME = Finding(9, "node", "descriptor 16 is an io_uring ring")
TRACED = Finding(8, "a.out", "is traced by pid 12 (debugger, strace or profiler): detach it")


class Job:
    """What `tell` asks of a ProtectedJob."""

    def __init__(self) -> None:
        self.job, self.phase, self.times = "7", Phase.RUNNING, Times()
        self.capsule: Any = SimpleNamespace(alive=lambda: True)
        self.context = SimpleNamespace(config=SimpleNamespace(engine=EngineConfig()))
        self.said, self.saved = list[str](), 0

    async def tell(self, message: str) -> None:
        self.said.append(message)

    def save(self) -> None:
        self.saved += 1


def told(monkeypatch: pytest.MonkeyPatch, job: Job, *looks: list[Finding]) -> list[str]:
    left = iter(looks)
    monkeypatch.setattr(outlook, "_AGAIN_S", 0.0)
    monkeypatch.setattr(outlook, "_findings", lambda *_: next(left))
    asyncio.run(outlook.tell(job))  # type: ignore[arg-type]
    assert next(left, None) is None, "fewer looks than thought"
    return job.said


def test_trouble_that_stays_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    (said,) = told(monkeypatch, job, [RING], [SAME])
    assert said == "as it is, this job can NOT be checkpointed: node (pid 7): descriptor 4 is an io_uring ring"
    assert job.saved == 1
    assert told(monkeypatch, job, [SAME]) == [said], "the same of another descriptor"
    assert len(told(monkeypatch, job, [SAME, TRACED], [TRACED])) == 2
    assert "traced" in job.said[1]
    assert "ring" not in job.said[1]


def test_what_goes_away_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, Job(), [TRACED], [RING]) == []
    assert told(monkeypatch, Job(), []) == []


@pytest.mark.parametrize("phase", [Phase.CHECKPOINTING, Phase.RESTORING, Phase.SEALING, Phase.LEAVING])
def test_nothing_is_looked_at_while_others_work_on_the_job(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    job = Job()
    job.phase = phase
    assert told(monkeypatch, job) == []


def test_a_checkpoint_in_between_spoils_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tools, CRIU's tracing among them, are not the job's."""
    job = Job()

    def look(*_: object) -> list[Finding]:
        job.phase = Phase.CHECKPOINTING
        return [TRACED]

    monkeypatch.setattr(outlook, "_findings", look)
    asyncio.run(outlook.tell(job))  # type: ignore[arg-type]
    assert job.said == []


def test_looks_are_taken_soon_and_then_seldom() -> None:
    times = Times(began=1000)
    due = [now - 1000 for now in range(1000, 1000 + 2 * 3600) if times.look_due(now)]
    assert due == [5, 30, 180, 1980, 3780, 5580]
    late = Times(began=0)
    assert late.look_due(4000)
    assert not late.look_due(4001), "an agent that was away looks once"
