"""Bytes that lie elsewhere one after another, at given places: in a file, or in the memory of a process.

Who calls: streams, for what is not in a pipe; parts, which get their bytes from here.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpucr_hpc.errors import MemoryUnreadable

#: Reads ranges (position, bytes), one after another, into memory of their size. Raises MemoryUnreadable.
Read = Callable[[Sequence[tuple[int, int]], memoryview], None]
#: Compared at a time: much more than is read, since nothing is held meanwhile.
SEALED_BYTES = 32 << 20
#: The marks, under a key, of chunks (position, bytes) as they are now (chunkid.py), and zero bytes for those that are
#: zero. Raises MemoryUnreadable.
Marks = Callable[[bytes, Sequence[tuple[int, int]]], Sequence[bytes]]


class Extent(NamedTuple):
    """`size` bytes at `position` of a source: a descriptor that is open for reading, which who made it closes, or
    something that reads."""

    source: int | Read
    position: int
    size: int


class Sealed(NamedTuple):
    """Chunks, one after another, that were sealed before and may have changed since. places: positions in the source
    and bytes; records: of each."""

    marks: Marks
    read: Read
    places: Sequence[tuple[int, int]]
    records: Sequence[bytes]


class Extents:
    """A part's bytes. Several threads may read from one source at the same time."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = list(extents)

    def empty_into(self, room: memoryview) -> None:
        """Read everything. Raises MemoryUnreadable when something cannot be read."""
        for source, some in itertools.groupby(self._extents, operator.attrgetter("source")):
            ranges = [(extent.position, extent.size) for extent in some]
            size = sum(length for _, length in ranges)
            target, room = room[:size], room[size:]
            if callable(source):
                source(ranges, target)
            else:
                _read(source, ranges, target)

    def done(self, *, empty: bool) -> None:
        """Nothing is held."""


def _read(fd: int, ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
    for begin, length in ranges:
        position, end = begin, begin + length
        while position < end:
            try:
                count = os.preadv(fd, [target[: end - position]], position)
            except OSError as error:
                raise MemoryUnreadable(reason=f"{error.strerror} at {position:#x}") from None
            if not count:
                raise MemoryUnreadable(reason=f"its process has ended, at {position:#x}")
            target, position = target[count:], position + count


class Cut(NamedTuple):
    """What becomes a part of a stream. last: its end ends a chunk."""

    size: int
    source: Extents | Sealed
    last: bool


def parts(extents: Iterable[Extent | Sealed], part_bytes: int) -> Iterator[Cut]:
    """The parts of a stream: `part_bytes` each, but for the last one, those before what was sealed, and that itself."""
    some: list[Extent] = []
    left = part_bytes
    for extent in extents:
        if isinstance(extent, Sealed):
            yield Cut(part_bytes - left, Extents(some), last=True)
            some, left = [], part_bytes
            yield from _sealed(extent)
            continue
        source, position, size = extent
        while size:
            count = min(size, left)
            some.append(Extent(source, position, count))
            position, size, left = position + count, size - count, left - count
            if not left:
                yield Cut(part_bytes, Extents(some), last=False)
                some, left = [], part_bytes
    yield Cut(part_bytes - left, Extents(some), last=True)


def _sealed(extent: Sealed) -> Iterator[Cut]:
    """As many chunks at a time as are no less than SEALED_BYTES."""
    begin = size = 0
    for number, (_, count) in enumerate(extent.places, 1):
        size += count
        if size >= SEALED_BYTES or number == len(extent.places):
            some = slice(begin, number)
            yield Cut(size, extent._replace(places=extent.places[some], records=extent.records[some]), last=True)
            begin, size = number, 0
