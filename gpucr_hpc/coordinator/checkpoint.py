"""The order of a checkpoint: every node READY, LOCKED, DUMPED; then the commit; then every node finishes.

Every phase waits for all nodes. A failure or the end of the time budget undoes all nodes, in reverse order, and the
job runs on. Publication of the manifest is the single point after which the checkpoint exists.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpucr_hpc import faults
from gpucr_hpc.errors import DeadlineExceeded
from gpucr_hpc.log import Log

log = Log(__name__)


class Participant(Protocol):
    """One node of the job. Each call returns when its phase is reached; any may raise a GpucrError."""

    async def prepare(self) -> None:
        """READY: preflight passed, a worker waits for the stream. Nothing of the job is touched."""

    async def lock(self) -> None:
        """LOCKED: outward connections closed, no packet of the job passes."""

    async def capture(self) -> None:
        """DUMPED: the tree is frozen and its image durable in the store."""

    async def commit(self) -> None:
        """COMMITTED: the checkpoint exists and the job will leave: a tree whose agent dies must not run on."""

    async def finish(self) -> None:
        """After the commit: end the tree, or let it run on."""

    async def undo(self) -> None:
        """Back to the state before `prepare`, from whatever phase was reached; must not raise."""


@dataclass
class Budget:
    """Time left for a checkpoint, in seconds of the monotonic clock."""

    job: str
    limit_s: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.started + self.limit_s - time.monotonic()


@dataclass
class Timings:
    """Seconds that each phase took, in order."""

    phases: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = round(now - self._last, 4)
        self._last = now


async def checkpoint(
    participants: Sequence[Participant],
    budget: Budget,
    *,
    agree: Callable[[], None],
    publish: Callable[[], Awaitable[None]],
    leave: Callable[[], Awaitable[None]] | None,
    timings: Timings,
) -> None:
    """Take one checkpoint.

    agree: called when all are LOCKED, raises when the cut cannot be taken now. publish: makes it exist. leave: called
    after the commit and before any tree ends, to requeue the job; when it fails the trees run on, and the checkpoint
    stays. Raises the first error after everything is undone.
    """
    try:
        for phase in ("prepare", "lock", "capture"):
            await _all(participants, phase, budget)
            if phase == "lock":
                agree()
            timings.mark(phase)
            faults.reach(f"after {phase}")
        await _within(publish(), "commit", budget)
        timings.mark("commit")
        faults.reach("after commit")
        if leave is not None:
            await _all(participants, "commit", budget)
            await leave()
            timings.mark("requeue")
            faults.reach("after requeue")
    except BaseException as error:
        log.warning("checkpoint undone", job=budget.job, error=str(error) or repr(error))
        await asyncio.shield(_undo(participants))
        raise
    await asyncio.gather(*(p.finish() for p in participants))
    timings.mark("finish")


async def _all(participants: Sequence[Participant], phase: str, budget: Budget) -> None:
    tasks = [asyncio.ensure_future(getattr(p, phase)()) for p in participants]
    try:
        await _within(asyncio.gather(*tasks), phase, budget)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _within(work: Awaitable[object], phase: str, budget: Budget) -> None:
    try:
        await asyncio.wait_for(work, max(0.0, budget.left()))
    except TimeoutError:
        raise DeadlineExceeded(job=budget.job, phase=phase, limit_s=budget.limit_s) from None


async def _undo(participants: Sequence[Participant]) -> None:
    for participant in reversed(participants):
        await participant.undo()
