"""Bytes that lie in files one after another, at given places: memory of a process in /proc/PID/mem, say.

Who calls: streams, for what is not in a pipe; parts, which get their bytes from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpucr_hpc.errors import MemoryUnreadable


class Extent(NamedTuple):
    """`size` bytes at `position` of a descriptor that is open for reading; who made it closes it."""

    fd: int
    position: int
    size: int


class Extents:
    """A part's bytes. Several threads may read from one descriptor at the same time."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = list(extents)

    def empty_into(self, room: memoryview) -> None:
        """Read everything. Raises MemoryUnreadable when something cannot be read."""
        for fd, position, size in self._extents:
            target, room = room[:size], room[size:]
            while target:
                try:
                    count = os.preadv(fd, [target], position)
                except OSError as error:
                    raise MemoryUnreadable(reason=f"{error.strerror} at {position:#x}") from None
                if not count:
                    raise MemoryUnreadable(reason=f"its process has ended, at {position:#x}")
                target, position = target[count:], position + count

    def done(self, *, empty: bool) -> None:
        """Nothing is held."""


def parts(extents: Iterable[Extent], part_bytes: int) -> Iterator[tuple[int, Extents]]:
    """Sizes and sources of the parts of a stream: `part_bytes` each, but for the last one."""
    some: list[Extent] = []
    left = part_bytes
    for fd, position, size in extents:
        while size:
            count = min(size, left)
            some.append(Extent(fd, position, count))
            position, size, left = position + count, size - count, left - count
            if not left:
                yield part_bytes, Extents(some)
                some, left = [], part_bytes
    if some:
        yield part_bytes - left, Extents(some)
