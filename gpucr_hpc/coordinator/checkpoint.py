"""The order of a checkpoint: every node READY, its GPUs HELD, LOCKED, DUMPED; the commit; then every node finishes.

A job that goes on does so before the commit: when every node has its memory, all let their trees run, and write what
they have read then.

Every phase waits for all nodes. A failure or the end of the time budget undoes all nodes at once, so that one that does
not answer keeps no other frozen, and the job runs on. Publication of the manifest is the single point after which the
checkpoint exists.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpucr_hpc.errors import CutNotPossible, DeadlineExceeded
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.log import Log

log = Log(__name__)

_REACHED = {
    "prepare": Point.PREPARED,
    "gpu_lock": Point.GPUS_HELD,
    "lock": Point.LOCKED,
    "capture": Point.CAPTURED,
    "resume": Point.RESUMED,
}
_LEAVING = ("prepare", "gpu_lock", "lock", "capture")
_STAYING = (*_LEAVING, "resume", "seal")
_HOLD_ATTEMPTS = 30
_HOLD_RESERVE_S = 2.0
_Result = TypeVar("_Result")


class Participant(Protocol):
    """One node of the job. Each call returns when its phase is reached; any may raise a GpucrError."""

    async def prepare(self) -> None:
        """READY: preflight passed, a worker waits for the stream. Nothing of the job is touched."""

    async def gpu_lock(self) -> None:
        """HELD: work on every GPU of this node has come to rest. Raises CutNotPossible, with none held, when it does
        not within a short time: a rank that waits in a collective for a held one never comes to rest."""

    async def gpu_unlock(self) -> None:
        """Back from HELD, also where `gpu_lock` failed; must not raise."""

    async def lock(self) -> None:
        """LOCKED: outward connections closed, no packet of the job passes."""

    async def capture(self) -> None:
        """DUMPED: the tree is frozen. Its image is durable in the store, or at least read, where the job goes on."""

    async def resume(self) -> None:
        """RESUMED: the tree runs on, network and outward connections are open. Only where the job goes on."""

    async def seal(self) -> None:
        """SEALED: the image of a tree that runs on is durable in the store."""

    async def commit(self) -> None:
        """COMMITTED: the checkpoint exists and the job will leave: a tree whose agent dies must not run on."""

    async def finish(self) -> None:
        """After the commit: end the tree; nothing is left to do with one that runs on."""

    async def undo(self) -> None:
        """Back to the state before `prepare`, from whatever phase was reached; must not raise. A tree that was resumed
        is not touched."""


class Quiesce(Protocol):
    """What the ranks of a job share beyond their nodes, and what no image can hold: NCCL's communicators."""

    async def take(self, left_s: float) -> None:
        """After `prepare` of every node: have it gone within the time left, in seconds. Nothing of it is needed for
        `gpu_lock` and later; an error undoes the checkpoint."""

    async def give_back(self) -> None:
        """Whatever `take` has reached: have it again, after all trees run on; must not raise. Nothing is done where it
        is back already. When it is cut off it is asked for again."""


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
    quiesce: Quiesce | None = None,
) -> None:
    """Take one checkpoint.

    No tree is resumed before all are captured: the images would not be of one moment.

    agree: called when all are LOCKED, raises when the cut cannot be taken now. publish: makes it exist. leave: called
    after the commit and before any tree ends, to requeue the job; when it fails the trees run on, and the checkpoint
    stays. quiesce: taken between `prepare` and `gpu_lock`, and given back as soon as all trees of a job run that goes
    on here. Raises the first error after everything is undone.
    """
    try:
        for phase in _STAYING if leave is None else _LEAVING:
            if phase == "gpu_lock":
                if quiesce is not None:
                    # The ranks catch up with each other, for which they need their GPUs and the network.
                    await _within(quiesce.take(budget.left()), "quiesce", budget)
                    timings.mark("quiesce")
                    await reach(Point.QUIET, budget.job)
                # Before any network is locked: a collective over it would wait for packets for ever.
                await _hold_gpus(participants, budget)
            else:
                await _all(participants, phase, budget)
            if phase == "lock":
                agree()
            timings.mark(phase)
            if phase in _REACHED:
                await reach(_REACHED[phase], budget.job)
            if phase == "resume" and quiesce is not None:
                # The ranks wait for it: no image is sealed before.
                await quiesce.give_back()
                timings.mark("give_back")
        await _within(publish(), "commit", budget)
        timings.mark("commit")
        await reach(Point.COMMITTED, budget.job)
        if leave is not None:
            await _all(participants, "commit", budget)
            await leave()
            timings.mark("requeue")
            await reach(Point.REQUEUED, budget.job)
    except BaseException as error:
        log.warning("checkpoint undone", job=budget.job, error=str(error) or repr(error))
        await asyncio.shield(_undo(participants, quiesce))
        raise
    done = await asyncio.gather(*(p.finish() for p in participants), return_exceptions=True)
    for result in done:
        if isinstance(result, Exception):  # there is no way back any more; a node that was lost looks after itself
            log.warning("a node did not finish", job=budget.job, error=str(result) or repr(result))
    timings.mark("finish")


async def _hold_gpus(participants: Sequence[Participant], budget: Budget) -> None:
    """All or none: when one node's GPUs do not come to rest, all are let go and tried again at another moment."""
    for attempt in itertools.count(1):
        tasks = [asyncio.ensure_future(p.gpu_lock()) for p in participants]
        try:
            # None is cut off: each ends by its own short limit, and nobody knows who holds a lock that was cut off.
            results = await _within(asyncio.gather(*tasks, return_exceptions=True), "gpu_lock", budget)
        finally:
            for task in tasks:
                task.cancel()
        errors = [r for r in results if isinstance(r, BaseException)]
        if not errors:
            return
        await asyncio.gather(*(p.gpu_unlock() for p in participants))
        serious = next((e for e in errors if not isinstance(e, CutNotPossible)), None)
        if serious is not None or attempt == _HOLD_ATTEMPTS or budget.left() < _HOLD_RESERVE_S:
            raise serious or errors[0]
        log.info("GPUs not at rest", job=budget.job, attempt=attempt, reason=str(errors[0]))
        await asyncio.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - spreads tries, hides nothing


async def _all(participants: Sequence[Participant], phase: str, budget: Budget) -> None:
    tasks = [asyncio.ensure_future(getattr(p, phase)()) for p in participants]
    try:
        await _within(asyncio.gather(*tasks), phase, budget)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _within(work: Awaitable[_Result], phase: str, budget: Budget) -> _Result:
    try:
        return await asyncio.wait_for(work, max(0.0, budget.left()))
    except TimeoutError:
        raise DeadlineExceeded(job=budget.job, phase=phase, limit_s=budget.limit_s) from None


async def _undo(participants: Sequence[Participant], quiesce: Quiesce | None) -> None:
    await asyncio.gather(*(p.undo() for p in participants))
    if quiesce is not None:
        await quiesce.give_back()
