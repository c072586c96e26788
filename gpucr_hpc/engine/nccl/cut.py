"""A cut through all ranks of a job, the end of its communicators, and their return. The states: docs/nccl-cut.md."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gpucr_hpc.engine.nccl.link import Link
from gpucr_hpc.engine.nccl.report import Report, Targets, obstacle, reached, rebuildable, targets
from gpucr_hpc.errors import NcclCutNotReached, NcclFailed, NcclUnprotected
from gpucr_hpc.log import Log

log = Log(__name__)

_Result = TypeVar("_Result")


class Cut:
    """The ranks behind `links`. Order: take, tear_down, (checkpoint), rebuild; `release` lets all go on."""

    def __init__(self, job: str, links: Sequence[Link]) -> None:
        self._job, self.links = job, links
        self._gone: list[Report] = []

    async def take(self, limit_s: float) -> None:
        """Every rank stands at one cut, with nothing under way on its GPU. Raises NcclUnprotected or NcclCutNotReached,
        and then all go on."""
        try:
            async with asyncio.timeout(limit_s):
                await self._take()
                await self._all(lambda link: link.drain())
                await self._all(lambda link: link.settle("drained", limit_s))
        except BaseException as error:
            await asyncio.shield(self.release())
            if isinstance(error, TimeoutError):
                raise NcclCutNotReached(job=self._job, limit_s=limit_s) from None
            raise

    async def _take(self) -> None:
        why = obstacle(await self._all(lambda link: link.ask()))
        if why:
            raise NcclUnprotected(job=self._job, reason=why)
        reports, version, sent = await self._all(lambda link: link.cut()), 0, Targets()
        pause = 0.0005
        while not (version and reached(reports, version, sent)):
            wanted = targets(reports)
            if wanted != sent or not version:
                version, sent, pause = version + 1, wanted, 0.0005
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)
            reports = await self._all(functools.partial(Link.target, targets=sent, version=version))
            if why := obstacle(reports):
                raise NcclUnprotected(job=self._job, reason=why)

    async def tear_down(self, limit_s: float) -> None:
        """Destroy every communicator; all ranks are past `take`. After an error `rebuild` or `release(lost=True)`."""
        self._gone = await self._all(lambda link: link.ask())
        await self._all(lambda link: link.destroy())
        await self._all(lambda link: link.settle("gone", limit_s))

    async def rebuild(self, limit_s: float) -> None:
        """Make them again, with ids that rank 0 of each makes, and let all go on. NcclFailed when one cannot."""
        ids: dict[str, str] = {}
        wanted = set(rebuildable(self._gone))
        for link, report in zip(self.links, self._gone, strict=True):
            mine = [c.gid for c in report.communicators if c.gid in wanted and c.rank == 0 and c.alive]
            if mine:
                ids |= await link.new_ids(mine)
        await self._all(lambda link: link.rebuild(ids))
        await self._all(lambda link: link.settle("rebuilt", limit_s))
        await self._all(lambda link: link.open())

    async def release(self, *, lost: bool = False) -> None:
        """Open the gates; must not raise. lost: what is not there is an error for the program from now on."""
        for link in self.links:
            try:
                await link.open(lost=lost)
            except NcclFailed as error:
                log.warning("a rank was not let go", job=self._job, error=str(error))

    async def _all(self, work: Callable[[Link], Awaitable[_Result]]) -> list[_Result]:
        results = await asyncio.gather(*(work(link) for link in self.links), return_exceptions=True)
        found: list[_Result] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        return found
