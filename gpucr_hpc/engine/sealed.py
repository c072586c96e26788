"""What of the memory of processes was sealed before they were frozen, and where.

Who calls: the worker, who seals it (early.py says which), and bypass, when the tree is frozen.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

from gpucr_hpc.image import layout
from gpucr_hpc.image.extents import Extent, Marks, Read, Sealed
from gpucr_hpc.image.streams import StreamWriter

#: With less in one place there is nothing to gain.
LEAST_BYTES = 4 << 20

Range = tuple[int, int]  # begin and end
Chunk = tuple[int, int, bytes]  # address, bytes, record


class SealedMemory:
    """Chunks by process, which is named by its number inside the namespace."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting: list[tuple[int, Sequence[Range], StreamWriter]] = []
        self._found: dict[int, list[Chunk]] = {}

    def name(self) -> str:
        """Of the next stream."""
        return f"early-{self._count + 1}.img"

    def add(self, pid: int, ranges: Sequence[Range], stream: StreamWriter) -> None:
        """A stream holds these ranges, one after another; none of them was in another."""
        self._look(lambda stream: stream.is_sealed)
        self._count += 1
        self._waiting.append((pid, ranges, stream))

    def chunks(self, pid: int) -> list[Chunk]:
        """Those that are in the store by now, in the order of their addresses. To be called when nothing is added any
        more."""
        self._look(lambda _: True)
        return sorted(self._found.get(pid, ()))

    def _look(self, wanted: Callable[[StreamWriter], bool]) -> None:
        """Where chunks are is found out as soon as can be: a tree that is frozen waits for it."""
        waiting, self._waiting = self._waiting, []
        for pid, ranges, stream in waiting:
            if wanted(stream):
                self._found.setdefault(pid, []).extend(_placed(ranges, stream.sealed()))
            else:
                self._waiting.append((pid, ranges, stream))


def _placed(ranges: Sequence[Range], records: bytes) -> Iterator[Chunk]:
    """Chunks that lie in one range as a whole."""
    places = iter(ranges)
    at, end = next(places)
    for begin in range(0, len(records), layout.RECORD.size):
        record = records[begin : begin + layout.RECORD.size]
        size = layout.RECORD.unpack(record)[2]
        if at + size <= end:
            yield at, size, record
        at += size
        while at >= end:
            over, (begin_of_next, end_of_next) = at - end, next(places, (0, 0))
            if not end_of_next:
                return
            at, end = begin_of_next + over, end_of_next


def split(address: int, size: int, chunks: Sequence[Chunk], read: Read, marks: Marks) -> Iterator[Extent | Sealed]:
    """Where the bytes from an address on are: chunks where there are any, in their order, and what lies between."""
    at, end = address, address + size
    for group in _groups(chunks, at, end):
        first, (last, length, _) = group[0][0], group[-1]
        if first > at:
            yield Extent(read, at, first - at)
        yield Sealed(marks, read, [chunk[:2] for chunk in group], [chunk[2] for chunk in group])
        at = last + length
    if at < end:
        yield Extent(read, at, end - at)


def _groups(chunks: Sequence[Chunk], begin: int, end: int) -> Iterator[list[Chunk]]:
    """Chunks between two addresses that follow one another without a gap, if they have LEAST_BYTES."""
    first = number = bisect.bisect_left(chunks, (begin,))
    while number < len(chunks) and chunks[number][0] + chunks[number][1] <= end:
        here, number = chunks[number], number + 1
        after = here[0] + here[1]
        goes_on = number < len(chunks) and chunks[number][0] == after and after + chunks[number][1] <= end
        if not goes_on:
            if after - chunks[first][0] >= LEAST_BYTES:
                yield list(chunks[first:number])
            first = number
