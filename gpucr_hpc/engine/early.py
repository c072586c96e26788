"""Seals memory of the host while the GPU driver fills it, before anything is frozen.

Who calls: the participant, around the driver's copy. That takes seconds in which one processor is at work. What it has
written is read and put into the image as chunks of streams of their own; when the tree is frozen all memory is read
again, and chunks that are as they were are found by their ids and not stored twice. So nothing depends on when the
driver has done with a page: one that was read too early costs space (docs/format.md, "early").
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from gpucr_hpc.engine import copier, large
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.log import Log

#: In mappings of less there is nothing to gain.
_MAPPING_BYTES = 64 << 20
#: Taken at a time, and not fewer than so many, since each end of what is taken ends a chunk.
_MOST_BYTES, _LEAST_BYTES = 512 << 20, 8 << 20
_PAUSE_S = 0.2

Range = tuple[int, int]  # begin and end

log = Log(__name__)


def possible() -> bool:
    """Whether this node has processors, kernel and program for it."""
    return large.has_processors() and copier.PROGRAM.is_file() and large.kernel_names_pages()


@contextlib.asynccontextmanager
async def sealing(worker: WorkerClient, pids: Mapping[int, int]) -> AsyncIterator[None]:
    """Seal what large memory processes get during the block; the worker has begun an image. pids: by the number inside
    the namespace, those on the host. What fails makes the image fail, and is raised by its end."""
    if not pids:
        yield
        return
    stopped = asyncio.Event()
    growing = [Growing(nspid, pid) for nspid, pid in pids.items()]
    async with copier.started(worker, pids, write=False):
        task = asyncio.ensure_future(_follow(worker, growing, stopped))
        try:
            yield
        finally:
            stopped.set()
            for failed in await asyncio.gather(task, return_exceptions=True):
                if isinstance(failed, GpucrError):
                    log.warning("sealed nothing early", error=str(failed))
                elif isinstance(failed, Exception):
                    raise failed


async def _follow(worker: WorkerClient, growing: Sequence[Growing], stopped: asyncio.Event) -> None:
    while not stopped.is_set():
        taken = False
        for process in growing:
            if not stopped.is_set() and (ranges := await asyncio.to_thread(process.settled)):
                await worker.call("early", pid=process.nspid, ranges=ranges)
                taken = True
        if not taken:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _PAUSE_S)


class Growing:
    """Large anonymous memory that a process has got since this was made."""

    def __init__(self, nspid: int, pid: int) -> None:
        self.nspid, self._pid = nspid, pid
        self._old = self._mappings()
        self._seen: list[Range] = []
        self._taken: list[Range] = []

    def settled(self) -> list[Range]:
        """Pages that were there at the last call, too, and were not named yet; nothing of a process that is gone."""
        try:
            with open(f"/proc/{self._pid}/pagemap", "rb") as pagemap:
                there: list[Range] = []
                for begin, end in minus(self._mappings(), self._old):
                    there += large.present_pages(pagemap.fileno(), begin, end)
        except OSError:
            return []
        ready = minus(common(there, self._seen), self._taken)
        self._seen = there
        found, left = [], _MOST_BYTES
        for begin, end in ready:
            if end - begin >= _LEAST_BYTES and left:
                found.append((begin, min(end, begin + left)))
                left -= found[-1][1] - begin
        self._taken = sorted([*self._taken, *found])
        return found

    def _mappings(self) -> list[Range]:
        try:
            text = Path(f"/proc/{self._pid}/maps").read_text(errors="replace")
        except OSError:
            return []
        found = large.anonymous_mappings(text.splitlines())
        return [(begin, end) for begin, end in found if end - begin >= _MAPPING_BYTES]


def common(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """What is in both; both in order, as is the result."""
    found, at = [], 0
    for begin, end in some:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            found.append((max(begin, others[here][0]), min(end, others[here][1])))
            here += 1
    return found


def minus(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """What is in the first only; both in order, as is the result."""
    found: list[Range] = []
    for first, last in some:
        begin = first
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= last:
                continue
            if other_begin > begin:
                found.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < last:
            found.append((begin, last))
    return found
