"""The processes of one node's capsule that use NCCL under the interposer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpucr_hpc import wire
from gpucr_hpc.capsule.processes import Process
from gpucr_hpc.engine.nccl.link import FOLDER, Link, Pairs, socket_path
from gpucr_hpc.engine.nccl.report import parse
from gpucr_hpc.errors import GpucrError, NcclFailed

_PEER_MEMORY = ("/dev/shm/nccl-", "/memfd:nccl", "/memfd:fake-nccl-peer")  # noqa: S108 - as /proc/PID/maps has it


def helpers(processes: Iterable[Process]) -> list[tuple[Process, Path]]:
    """Those that have begun to use NCCL under the interposer, with their sockets."""
    found = [(p, socket_path(p.pid, p.nspid)) for p in processes if p.state not in "ZX"]
    return [(p, path) for p, path in found if os.path.exists(path) and _listens(p)]


def _listens(process: Process) -> bool:
    """Whether the socket file is of a process that lives: numbers come again."""
    try:
        text = Path(f"/proc/{process.pid}/net/unix").read_text(errors="replace")
    except OSError:
        return False
    return any(line.endswith(f" /{FOLDER}/gpucr-nccl.{process.nspid}") for line in text.splitlines())


class NodeRanks:
    """Implements cut.Ranks for this node."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)

    @classmethod
    async def connect(cls, processes: Iterable[Process], uid: int) -> NodeRanks:
        """Raises NcclFailed, with no connection left open, when one of them cannot be reached."""
        ranks = cls([])
        try:
            for process, path in helpers(processes):
                ranks.links.append(await Link.connect(path, process.pid, uid))
        except BaseException:
            ranks.drop()
            raise
        return ranks

    async def order(self, word: str, pairs: Pairs = (), at: int | None = None) -> list[wire.Frame]:
        """Give an order to all, or to the one at this place, and get their reports in order. All have answered, or
        failed, when the first error is raised."""
        wanted = self.links if at is None else [self.links[at]]
        pairs = list(pairs)
        results = await asyncio.gather(*(link.order(word, pairs) for link in wanted), return_exceptions=True)
        found: list[wire.Frame] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        return found

    async def verify(self) -> None:
        """After their communicators are gone: raise NcclFailed when a process still shares memory by NCCL."""
        for link in self.links:
            try:
                text = Path(f"/proc/{link.pid}/maps").read_text(errors="replace")
            except OSError:
                continue  # it has ended; the dump finds out
            left = next((line for line in text.splitlines() if any(name in line for name in _PEER_MEMORY)), None)
            if left is not None:
                raise NcclFailed(pid=link.pid, reason=f"memory of NCCL is left after its end: {left.split()[-1]}")

    async def close(self) -> None:
        """Leave all, and wait until they have closed their ends."""
        await asyncio.gather(*(link.leave() for link in self.links))

    def drop(self) -> None:
        """Close at once."""
        for link in self.links:
            link.close()


class Covered(NamedTuple):
    """A process that has a helper. why: its communicators cannot be made again; empty: they can. shares: how it shares
    GPU memory by itself. cards: see Report."""

    why: str
    shares: str = ""
    cards: frozenset[str] = frozenset()


async def covered(processes: Iterable[Process], uid: int) -> dict[int, Covered]:
    """By pid on the host."""
    found: dict[int, Covered] = {}
    for process, path in helpers(processes):
        try:
            link = await Link.connect(path, process.pid, uid)
            report = parse(await link.order("ask"))
            found[process.pid] = Covered(report.unprotected, report.shares, report.cards)
            await link.leave()
        except GpucrError as error:
            found[process.pid] = Covered(str(error))
    return found
