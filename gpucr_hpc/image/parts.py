"""One part of a stream: where its chunks end, and their way into the store.

Who calls: streams make parts, the crew's threads fetch and seal them. A chunk may begin in one part and end in the next
one: a part that is cut says to its successor what is left at its end, and the successor seals that with its own
beginning. Parts are fetched and sealed in any order, and cut in that of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from gpucr_hpc.errors import GpucrError, ImageError
from gpucr_hpc.image import cutting
from gpucr_hpc.image.buffers import Buffer, Pool
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.packs import Packs, Piece
from gpucr_hpc.image.relay import Relay

_SMALL_BYTES = 64 << 10  # sealed where it was read: a hand-over costs as much, and its buffer would be mostly air


class Source(Protocol):
    """Where a part's bytes are before it is fetched: a pipe, or memory of a process."""

    def empty_into(self, room: memoryview) -> None:
        """Put all of them into `room`, which has their size."""

    def done(self, *, empty: bool) -> None:
        """Called once, when nothing is wanted from it any more. empty: whether all has been taken out."""


class Means:
    """What the parts of an image share; part_bytes: their size. path: its name for messages."""

    def __init__(self, packs: Packs, buffers: Pool, relay: Relay, part_bytes: int, path: str) -> None:
        self.packs, self.buffers, self.relay, self.part_bytes = packs, buffers, relay, part_bytes
        self.lock = threading.Lock()
        self.failure: GpucrError | None = None
        self._path = path

    def fail(self, error: Exception) -> None:
        """The image is lost; the first reason counts. From any thread."""
        if not isinstance(error, GpucrError):  # a bug or MemoryError: the image must not look complete
            error = ImageError(path=self._path, reason=f"{type(error).__name__}: {error}")
        with self.lock:
            self.failure = self.failure or error
        self.relay.close()

    def check(self) -> None:
        """Raise what made the image fail, if anything did."""
        if self.failure is not None:
            raise self.failure


class Part:
    """`size` bytes in a buffer, or in a source from which `fetch` gets them.

    before: the part before it in its stream. keep: makes place for so many records at the stream's end, and says the
    first one's number; put: writes records from that number on. pages: it is cut by its content, else by size.
    last: nothing follows.
    """

    def __init__(
        self,
        means: Means,
        size: int,
        source: Buffer | Source | None,
        *,
        before: Part | None,
        keep: Callable[[int], int],
        put: Callable[[int, bytes], None],
        pages: bool,
        last: bool,
    ) -> None:
        self._means, self._before = means, before
        self._keep, self._put, self._pages = keep, put, pages
        self.size_bytes, self.is_last = size, last
        self._buffer = source if isinstance(source, Buffer) else None
        self._source = None if isinstance(source, Buffer) else source
        self._ends: list[int] = []
        self._joined: Part | None = None  # where its first chunk began
        self._number = 0
        self._mark = 1
        self._users = 1  # of the buffer
        self._cutting = threading.Lock()
        self._is_cut = False
        self._fetched = threading.Event()
        if self._source is None:
            self._fetched.set()

    @property
    def is_fetched(self) -> bool:
        """Whether its bytes are in memory, and none in its source."""
        return self._fetched.is_set()

    @property
    def is_small(self) -> bool:
        """Whether handing it over costs more than sealing it at once, for which those before it must be cut."""
        before = self._before
        return self.is_fetched and self.size_bytes <= _SMALL_BYTES and (before is None or before._is_cut)

    @property
    def _left(self) -> int:
        """Bytes at the end that belong to the next part's first chunk."""
        return self.size_bytes - self._ends[-1] if self._ends else 0

    def fetch(self) -> None:
        """Get the bytes. A failure is the image's. Twice is fine."""
        source, self._source = self._source, None
        if source is None:
            return
        empty = False
        try:
            self._means.check()
            self._buffer = self._means.buffers.take()
            source.empty_into(self._buffer.view[: self.size_bytes])
            empty = True
        except Exception as error:
            self._means.fail(error)
        finally:
            source.done(empty=empty)
            self._fetched.set()

    def wait(self) -> None:
        """Return when it is fetched."""
        self._fetched.wait()

    def _settle(self) -> None:
        """Decide where chunks end, in all parts up to this one in the order of the stream."""
        uncut, part = [], self if not self._is_cut else None
        while part is not None:
            uncut.append(part)
            part = part._before  # nothing for one that is being cut: then those before it are
        for part in reversed(uncut):
            with part._cutting:
                if not part._is_cut:
                    part._cut()
                    part._is_cut, part._before = True, None

    def _cut(self) -> None:
        self.wait()
        self._means.check()
        before, left, mark = self._before, 0, 1
        if before is not None:
            left, mark = before._left, before._mark
            self._joined = before if left else None
        if self._pages:
            pages, self._mark = cutting.cut(self._buffer, self.size_bytes, left // cutting.PAGE_BYTES, mark)
            self._ends = [page * cutting.PAGE_BYTES for page in pages]
            if self.is_last and left + self.size_bytes > 0 and self._ends[-1:] != [self.size_bytes]:
                self._ends.append(self.size_bytes)
        else:
            self._ends = [*range(CHUNK_BYTES, self.size_bytes, CHUNK_BYTES), self.size_bytes]
        self._users += self._left > 0
        self._number = self._keep(len(self._ends))

    def seal(self) -> None:
        """Have its chunks stored and their records put; a failure is the image's."""
        try:
            self._settle()
            self._means.check()
            before, self._joined = self._joined, None
            try:
                self._put(self._number, self._means.packs.store(self._pieces(before)))
            finally:
                if before is not None:
                    before._let_go()
        except Exception as error:
            self._means.fail(error)
        finally:
            self._let_go()

    def _pieces(self, before: Part | None) -> list[Piece]:
        """Where its chunks are. before: the part in which the first one began."""
        pieces, at, ends, buffer = [], 0, self._ends, self._buffer
        if before is not None:
            assert before._buffer is not None
            at, first = ends[0], before._left
            pieces.append(Piece(before._buffer, before._ends[-1], first, first + at, buffer or before._buffer))
            ends = ends[1:]
        for end in ends:
            assert buffer is not None
            pieces.append(Piece(buffer, at, end - at, end - at, buffer))
            at = end
        return pieces

    def _let_go(self) -> None:
        with self._means.lock:
            self._users -= 1
            buffer = None if self._users else self._buffer
        if buffer is not None:
            self._buffer = None
            self._means.buffers.give(buffer)

    def drop(self) -> None:
        """It comes too late: nobody will fetch it."""
        source, self._source = self._source, None
        if source is not None:
            source.done(empty=False)
            self._fetched.set()
