"""Pieces of a stream into a pipe: by reference where that is safe, else copied.

Who calls: reader. Every piece is the beginning of a buffer that comes from a pool and goes back to it.
"""

from __future__ import annotations

import mmap
import os
import select
from collections import deque
from collections.abc import Iterable

from gpucr_hpc.image.buffers import Buffer, Pool, lend
from gpucr_hpc.image.chunks import ZEROS
from gpucr_hpc.image.files import wait_for, widen_pipe

#: Smaller pieces are copied into a pipe.
_WORTH_LENDING_BYTES = 64 << 10


class Outlet:
    """Where a stream goes: a pipe, or a file.

    patches: offset in the stream and bytes that take the place of the stream's own. lending: the other end of the pipe
    copies what it reads; one that splices pages on would see them change.
    """

    def __init__(self, fd: int, pool: Pool, patches: Iterable[tuple[int, bytes]], *, lending: bool) -> None:
        slots = widen_pipe(fd) // mmap.PAGESIZE
        self._fd, self._pool, self._patches = fd, pool, list(patches)
        self._lender = _Lender(fd, slots, pool) if slots and lending else None

    def put(self, position: int, piece: memoryview, buffer: Buffer) -> None:
        """The piece that begins at `position` of the stream; its buffer is given back in time. Raises OSError,
        BrokenPipeError."""
        size = len(piece)
        touched = [p for p in self._patches if p[0] < position + size and position < p[0] + len(p[1])]
        if self._lender is not None and not touched and size >= _WORTH_LENDING_BYTES:
            self._lender.put(buffer, size)
            return
        _write_all(self._fd, _patched(piece, position, touched) if touched else piece)
        if buffer is not ZEROS:
            self._pool.give(buffer)


def _write_all(fd: int, piece: memoryview) -> None:
    """Write everything, waiting where the other side is slow."""
    while piece:
        try:
            piece = piece[os.write(fd, piece) :]
        except BlockingIOError:
            wait_for(fd, select.POLLOUT)


class _Lender:
    """Puts buffers into a pipe without a copy, and gives them back to their pool when the reader has taken them.

    A pipe holds at most as many pages as it has slots: when that many have gone in behind a buffer, it is out.
    """

    def __init__(self, fd: int, slots: int, pool: Pool) -> None:
        self._fd, self._slots, self._pool = fd, slots, pool
        self._lent: deque[tuple[int, Buffer]] = deque()
        self._total = 0

    def put(self, buffer: Buffer, size: int) -> None:
        """The first `size` bytes of a buffer. Raises OSError, BrokenPipeError."""
        at = 0
        while at < size:
            try:
                taken = lend(self._fd, buffer, at, size - at)
            except BlockingIOError:
                wait_for(self._fd, select.POLLOUT)
                continue
            # Every page that begins in this part has a slot of its own, and no slot holds more than a page.
            self._total += taken // mmap.PAGESIZE
            at += taken
        if buffer is not ZEROS:
            self._lent.append((self._total, buffer))
        while self._lent and self._total - self._lent[0][0] >= self._slots:
            self._pool.give(self._lent.popleft()[1])


def _patched(piece: memoryview, position: int, patches: Iterable[tuple[int, bytes]]) -> memoryview:
    """A copy of a piece of a stream that begins at `position`, with the patches that touch it."""
    copy = bytearray(piece)
    for offset, data in patches:
        start, end = max(offset, position), min(offset + len(data), position + len(piece))
        copy[start - position : end - position] = data[start - offset : end - offset]
    return memoryview(copy)
