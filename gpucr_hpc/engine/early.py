"""Seals memory of the host while the GPU driver fills it, before anything is frozen.

Who calls: the participant, around the driver's copy. That takes seconds in which one processor is at work. What it has
written is read and put into the image as chunks of streams of their own; when the tree is frozen each of them is
compared with the memory (sealed.py), and what is another then is read and sealed anew. So nothing depends on when the
driver has done with a page: one that was read too early costs space (docs/format.md, section 2.4).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
_PIECE_BYTES, _SAMPLE_BYTES = 2 << 20, 4096
_ZEROS = bytes(_SAMPLE_BYTES)
_PAUSE_S = 0.05

Range = tuple[int, int]  # begin and end

log = Log(__name__)


def possible() -> bool:
    """Whether this node has processors, kernel and program for it."""
    return large.has_processors() and copier.PROGRAM.is_file() and large.kernel_names_pages()


@contextlib.asynccontextmanager
async def sealing(worker: WorkerClient, pids: Mapping[int, int]) -> AsyncIterator[None]:
    """Seal what large memory processes get during the block; the worker has begun an image, and can read them
    (copier.py). pids: by the number inside the namespace, those on the host. What fails makes the image fail, and is
    raised by its end."""
    if not pids:
        yield
        return
    stopped = asyncio.Event()
    growing = [Growing(nspid, pid) for nspid, pid in pids.items()]
    tasks = [asyncio.ensure_future(_follow(worker, process, stopped)) for process in growing]
    try:
        yield
    except BaseException:
        for task in tasks:  # the worker, who may wait for its store, is given up after this
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    stopped.set()
    for failed in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(failed, GpucrError):
            log.warning("not sealed early", error=str(failed))
        elif isinstance(failed, Exception):
            raise failed


async def _follow(worker: WorkerClient, process: Growing, stopped: asyncio.Event) -> None:
    ranges: list[Range] = []
    while not stopped.is_set():
        if ranges:  # the next look goes on beside it
            look = asyncio.ensure_future(asyncio.to_thread(process.settled))
            try:
                await worker.call("early", pid=process.nspid, ranges=ranges)
            finally:
                ranges = await look
        else:
            ranges = await asyncio.to_thread(process.settled)
        if not ranges:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _PAUSE_S)


class Growing:
    """Large anonymous memory that a process has got since this was made, and what of it has content.

    The driver first makes all memory, which is zero then, and fills it afterwards. So pieces are taken whose end was
    not zero at the last look; those that stay zero cost nothing later either.
    """

    def __init__(self, nspid: int, pid: int) -> None:
        self.nspid, self._pid = nspid, pid
        self._old = self._mappings()
        self._filled: list[Range] = []
        self._named: list[Range] = []

    def settled(self) -> list[Range]:
        """What had content at the last call, each time something else; nothing of a process that is gone."""
        found, self._filled = self._filled, []
        self._named = joined([*self._named, *found])
        try:
            with (
                open(f"/proc/{self._pid}/pagemap", "rb") as pagemap,
                open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory,
            ):
                there: list[Range] = []
                for begin, end in minus(self._mappings(), self._old):
                    there += large.present_pages(pagemap.fileno(), begin, end)
                self._filled = self._with_content(memory.fileno(), minus(there, self._named))
        except OSError:
            pass
        return found

    def _with_content(self, memory: int, ranges: Sequence[Range]) -> list[Range]:
        """Neighbouring pieces whose end is not zero, as many as are taken at a time; what lies alone is left."""
        found: list[Range] = []
        left = _MOST_BYTES
        for first, last in ranges:
            begin = first
            for end in range(first + _PIECE_BYTES, last + 1, _PIECE_BYTES):
                filled = os.pread(memory, _SAMPLE_BYTES, end - _SAMPLE_BYTES) != _ZEROS
                run = (begin, end if filled else end - _PIECE_BYTES)
                size = run[1] - run[0]
                if size >= _LEAST_BYTES and (not filled or size >= left or end + _PIECE_BYTES > last):
                    found.append(run)
                    left -= size
                    begin = run[1]
                if left <= 0:
                    return found
                if not filled:
                    begin = end
        return found

    def _mappings(self) -> list[Range]:
        try:
            text = Path(f"/proc/{self._pid}/maps").read_text(errors="replace")
        except OSError:
            return []
        found = large.anonymous_mappings(text.splitlines())
        return [(begin, end) for begin, end in found if end - begin >= _MAPPING_BYTES]


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same in order, neighbours as one."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
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
