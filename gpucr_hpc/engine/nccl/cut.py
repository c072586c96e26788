"""A cut through all ranks of a job, the end of its communicators, and their return. The states: docs/nccl-cut.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Protocol, TypeVar

from gpucr_hpc.engine.nccl.link import Pairs
from gpucr_hpc.engine.nccl.report import (
    Report,
    Targets,
    incomplete,
    obstacle,
    parse,
    reached,
    rebuildable,
    targets,
)
from gpucr_hpc.errors import CutNotPossible, GpucrError, NcclCutNotReached, NcclFailed, NcclUnprotected
from gpucr_hpc.log import Log
from gpucr_hpc.wire import Frame

log = Log(__name__)

_Result = TypeVar("_Result")
_PATIENCE_S, _MOMENT_S = 0.3, 0.02
_GOING = frozenset({"draining", "destroying"})
_COMING = frozenset({"rebuilding", "rebuilt"})
_CAN_OPEN = frozenset({"open", "closed", "drained", "rebuilt"})


class Ranks(Protocol):
    """The processes of one node."""

    async def order(self, word: str, pairs: Pairs = (), at: int | None = None) -> list[Frame]:
        """Give an order to all, or to the one at this place, and get their reports in order. All have answered, or
        failed, when the first error is raised."""


class Cut:
    """Order: take, tear_down, (checkpoint), bring_back; `release` lets all go on.

    Nothing is remembered here: `bring_back` asks what there is, so another agent than the one that took the cut may
    do it.
    """

    def __init__(self, job: str, nodes: Sequence[Ranks]) -> None:
        self._job, self.nodes = job, nodes
        self._stuck = ""

    async def ask(self) -> list[Report]:
        return await self._order("ask")

    async def take(self, limit_s: float) -> None:
        """Every rank stands at one cut, with nothing under way on its GPU. Raises NcclUnprotected, CutNotPossible or
        NcclCutNotReached, and then all go on."""
        try:
            async with asyncio.timeout(limit_s):
                await self._take()
                await self._order("drain")
                await self._settle("drained", limit_s)
        except BaseException as error:
            await asyncio.shield(self.release())
            if isinstance(error, TimeoutError):
                raise NcclCutNotReached(job=self._job, limit_s=limit_s, reason=self._stuck or "work on a GPU") from None
            raise

    async def _take(self) -> None:
        self._check(await self.ask())
        reports, version, sent = await self._order("cut"), 0, Targets()
        pause, clock = 0.0005, asyncio.get_running_loop().time
        changed = clock()
        while not (version and reached(reports, version, sent)):
            wanted = targets(reports)
            if wanted != sent or not version:
                version, sent, pause, changed = version + 1, wanted, 0.0005, clock()
            elif clock() - changed > _PATIENCE_S:
                # Who is behind may wait for one who is not, by other ways than NCCL: all go on for a moment.
                version, sent = version + 1, replace(wanted, free=True)
                await self._order("target", sent.pairs_of_frame(version))
                await asyncio.sleep(_MOMENT_S)
                reports = await self.ask()
                continue
            self._stuck = incomplete(reports) or "a rank is behind"
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)
            reports = await self._order("target", sent.pairs_of_frame(version))
            self._check(reports)
        self._stuck = ""
        if why := incomplete(reports):
            raise CutNotPossible(job=self._job, reason=why)

    def _check(self, reports: list[Report]) -> None:
        if why := obstacle(reports):
            raise NcclUnprotected(job=self._job, reason=why)

    async def tear_down(self, limit_s: float) -> None:
        """Destroy every communicator; all ranks are past `take`. After an error `bring_back`."""
        await self._order("destroy")
        await self._settle("gone", limit_s)

    async def bring_back(self, limit_s: float) -> None:
        """Wherever a cut was left: make what was destroyed again, with ids made by rank 0 of each, and let all go on.

        Raises NcclFailed when that cannot be, PeerLost when a node is away; `release(lost=True)` is what is left then.
        """
        reports = await self.ask()
        if {"destroying", "gone"} & {report.state for report in reports}:
            # Nobody goes on after it has drained without a word from us: who has not heard of the end stands where it
            # stood, and those in the middle of it may wait for him.
            await self._one_by_one("destroy", [report.state == "drained" for report in reports])
        reports = await self._rest(_GOING, limit_s)
        gone = [report.state == "gone" for report in reports]
        if any(gone) and {report.state for report in reports} <= {"gone"} | _COMING:
            await self._one_by_one("rebuild", gone, await self._ids(reports))
        reports = await self._rest(_GOING | {"rebuilding"}, limit_s)
        for report in reports:
            if report.state not in _CAN_OPEN:
                raise NcclFailed(pid=0, reason=report.why or f"a rank is {report.state}")
        if any(report.state != "open" for report in reports):
            await self._order("open", [("LOST", "0")])

    async def _ids(self, reports: list[Report]) -> list[tuple[str, str]]:
        """By which the ranks meet: new ones, or those that some have been told already by a lead that was lost then.
        They wait for the others, and the ids' listeners are in the ranks, whoever has carried them."""
        for node, at, report in await self._places(reports):
            if report.state in _COMING:
                [answer] = await node.order("ids", (), at)
                return [("ID", text) for text in answer.all("ID")]
        return await self._new_ids(reports)

    async def _new_ids(self, reports: list[Report]) -> list[tuple[str, str]]:
        wanted, ids = set(rebuildable(reports)), []
        for node, at, report in await self._places(reports):
            mine = [c.gid for c in report.communicators if c.gid in wanted and c.rank == 0 and c.alive]
            if mine:
                [answer] = await node.order("ids", [("GID", gid) for gid in mine], at)
                ids += [("ID", text) for text in answer.all("ID")]
        return ids

    async def _one_by_one(self, word: str, which: list[bool], pairs: Pairs = ()) -> None:
        places, pairs = await self._places(which), list(pairs)
        await _each(node.order(word, pairs, at) for node, at, wanted in places if wanted)

    async def _places(self, values: Sequence[_Result]) -> list[tuple[Ranks, int, _Result]]:
        """The node of each rank and its place there, beside its value."""
        counts = [len(frames) for frames in await _each(node.order("ask") for node in self.nodes)]
        places = [(node, at) for node, count in zip(self.nodes, counts, strict=True) for at in range(count)]
        return [(node, at, value) for (node, at), value in zip(places, values, strict=True)]

    async def release(self, *, lost: bool = False) -> None:
        """Open the gates; must not raise. lost: what is not there is an error for the program from now on."""
        results = await asyncio.gather(
            *(node.order("open", [("LOST", str(int(lost)))]) for node in self.nodes), return_exceptions=True
        )
        for result in results:
            if isinstance(result, GpucrError):
                log.warning("a rank was not let go", job=self._job, error=str(result))
            elif isinstance(result, BaseException):
                log.error("a rank was not let go", job=self._job, error=repr(result))

    async def _settle(self, wanted: str, limit_s: float) -> None:
        """Wait for the end of a long action; NcclFailed with a process's reason, or for the time."""
        for report in await self._rest(_GOING, limit_s):
            if report.state != wanted:
                raise NcclFailed(pid=0, reason=report.why or f"a rank is {report.state}, not {wanted}")

    async def _rest(self, busy: AbstractSet[str], limit_s: float) -> list[Report]:
        """The reports when nobody is in one of these states."""
        pause, deadline = 0.001, asyncio.get_running_loop().time() + limit_s
        while True:
            reports = await self.ask()
            found = [report.state for report in reports if report.state in busy]
            if not found:
                return reports
            if asyncio.get_running_loop().time() > deadline:
                raise NcclFailed(pid=0, reason=f"a rank is still {found[0]} after {limit_s:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)

    async def _order(self, word: str, pairs: Pairs = ()) -> list[Report]:
        pairs = list(pairs)
        return [parse(frame) for frames in await _each(n.order(word, pairs) for n in self.nodes) for frame in frames]


async def _each(work: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """All are waited for, then the first error is raised."""
    found: list[_Result] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
