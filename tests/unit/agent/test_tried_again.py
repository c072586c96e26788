"""Which checkpoints that failed are tried again, and how long."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import checkpointing
from gpucr_hpc.agent.checkpointing import pause_s
from gpucr_hpc.config import EngineConfig
from gpucr_hpc.errors import Busy, CutNotPossible, DumpFailed, GpucrError, PeerLost, Refused, RunOver, StoreError

IN_FLIGHT = DumpFailed(reason="a connection was just being made", log="no")
REFUSED = Refused(reason="cannot be checkpointed")
CUT = CutNotPossible(job="7", reason="a step just starts")
LOST = PeerLost(job="7", node="n2", reason="reset")
STORE = StoreError(path="/scratch", reason="Input/output error")


def tries(error: GpucrError, left_s: float, took_s: float, *, last: bool) -> tuple[int, float]:
    """How often it is tried when it fails each time, and the time left at the end."""
    for attempt in itertools.count(1):
        left_s -= took_s
        pause = pause_s(error, attempt, took_s, left_s, last=last)
        if pause is None:
            return attempt, left_s
        assert attempt < 1000
        left_s -= pause
    raise AssertionError


@pytest.mark.parametrize("error", [IN_FLIGHT, REFUSED, CUT, LOST, STORE], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("took_s", [0.1, 3.0, 20.0])
def test_whatever_stands_against_the_last_one(error: GpucrError, took_s: float) -> None:
    """Slurm takes the job away: it is tried until a try more would come too late, and never later."""
    count, left_s = tries(error, 120.0, took_s, last=True)
    assert count >= 3
    assert 0 < left_s < 5 + 5 + max(5, took_s) + 2 * took_s


@pytest.mark.parametrize(("error", "most"), [(IN_FLIGHT, 3), (CUT, 20), (REFUSED, 1), (LOST, 1), (STORE, 1)])
def test_one_that_nothing_depends_on(error: GpucrError, most: int) -> None:
    """It stands still for each try: only what passes in a moment is tried again, and seldom."""
    assert tries(error, 600.0, 0.1, last=False)[0] == most


@pytest.mark.parametrize("error", [Busy(job="7", operation="a checkpoint"), RunOver(job="7", run=1)])
def test_what_somebody_else_does(error: GpucrError) -> None:
    assert pause_s(error, 1, 0.1, 100.0, last=True) is None


class Job:
    """One whose checkpoints end as told, each in a moment."""

    job = "7"

    def __init__(self, results: list[GpucrError | None], lives: int = 1000) -> None:
        self.results, self.made, self.stopped, self.lives = results, 0, 0, lives
        self.context = SimpleNamespace(config=SimpleNamespace(engine=EngineConfig()))
        self.capsule = SimpleNamespace(alive=lambda: self.made < self.lives)

    async def stop_sealing(self) -> None:
        self.stopped += 1

    def checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> list[set[type]]:
        """Takes the last one of a preemption; what was told before each try."""
        told = []

        class Checkpoint:
            def __init__(_, *args: Any) -> None:  # noqa: N805
                told.append(set(args[-1]))

            async def take(_) -> dict[str, Any]:  # noqa: N805
                self.made += 1
                result = self.results[self.made - 1]
                if result is not None:
                    raise result
                return {}

        monkeypatch.setattr(checkpointing, "_Checkpoint", Checkpoint)
        monkeypatch.setattr(checkpointing, "pause_s", lambda *args, **more: min(0.0, pause_s(*args, **more) or 0.0))
        info: Any = SimpleNamespace(end_time=time.time() + 60, requeued=False)
        job: Any = self
        asyncio.run(checkpointing.checkpoint(job, "preempt", leave=True, info=info))
        return told


def test_the_user_reads_of_each_kind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([REFUSED, IN_FLIGHT, IN_FLIGHT, None])
    assert job.checkpoint(monkeypatch) == [set(), {Refused}, {Refused, DumpFailed}, {Refused, DumpFailed}]
    assert job.stopped == 3


def test_a_job_that_has_ended_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([REFUSED, None], lives=1)
    with pytest.raises(Refused):
        job.checkpoint(monkeypatch)
