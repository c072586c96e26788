"""One stream of a new image.

Who calls: the engine, one thread for each stream. What is not memory, or not in a pipe, is read into buffers here;
memory in a pipe or in a process is handed on unread, so that the threads of the crew copy it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterable

from gpucr_hpc.errors import UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.again import Again
from gpucr_hpc.image.buffers import Buffer
from gpucr_hpc.image.crew import Crew
from gpucr_hpc.image.extents import Extent, Sealed, parts
from gpucr_hpc.image.files import wait_for, widen_pipe
from gpucr_hpc.image.parts import Means, Part, Source

_EMPTY_RECORD = bytes(layout.RECORD.size)


class StreamWriter:
    """One stream of an image; used by one thread at a time. pages: it holds memory, page by page. early: see
    ImageWriter.stream."""

    def __init__(self, means: Means, crew: Crew, name: str, pages: bool, early: bool) -> None:
        self.name, self.early = name, early
        self.size_bytes = 0
        self.closed = False
        self._means, self._crew, self._pages = means, crew, pages
        self._part_bytes = means.part_bytes
        self._buffer: Buffer | None = None
        self._filled = 0
        self._last: Part | None = None
        self._fetching: deque[Part] = deque()
        self._lock = threading.Lock()
        self.records = bytearray()
        self._sealed_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take all of `data`; its length. Raises the image's first failure, UsageError when closed."""
        left = memoryview(data).cast("B")
        total = len(left)
        while left:
            buffer = self._room()
            count = min(len(left), self._part_bytes - self._filled)
            buffer.view[self._filled : self._filled + count] = left[:count]
            left = left[count:]
            self._advance(count)
        return total

    def copy_fd(self, fd: int) -> int:
        """Read a pipe, socket or file to its end into the stream; the bytes read. The caller closes both.

        When `close` has returned, too, the last byte has left the pipe and those that it was passed on in, even if
        chunks still wait for the disk: CRIU's pages in a pipe are live pages of the job, so its post-dump hook must
        wait for exactly this. Raises OSError (of the descriptor), the image's first failure.
        """
        self._room()
        before = self.size_bytes + self._filled
        if widen_pipe(fd) and self._pages and not self._filled:
            self._hand_on(fd)
        while True:
            buffer = self._room()
            try:
                count = os.readv(fd, [buffer.view[self._filled : self._part_bytes]])
            except BlockingIOError:
                wait_for(fd, select.POLLIN)
                continue
            if not count:
                return self.size_bytes + self._filled - before
            self._advance(count)

    def copy_extents(self, extents: Iterable[Extent | Sealed]) -> int:
        """Append what lies in files or in memory of processes; the bytes. Only for memory, and to a stream that is
        empty.

        The crew reads it: when `close` has returned, too, all is read, and the descriptors may be closed. After a
        failure they may be when the image is aborted. Raises MemoryUnreadable, the image's first failure.
        """
        assert self._pages
        assert not self._filled + self.size_bytes
        total = 0
        for size, source, last in parts(extents, self._part_bytes):
            if isinstance(source, Sealed):
                self._hand_over(Again(self._means, size, source, before=self._last, keep=self._keep, put=self._put))
            elif size or self._ends_inside_chunk:
                self._submit(size, source if size else None, last)
            total += size
        return total

    @property
    def is_sealed(self) -> bool:
        """Whether all chunks of a closed stream are in the store."""
        with self._lock:
            return self._sealed_bytes == self.size_bytes

    def sealed(self) -> bytes:
        """The records of its first chunks, as many as are in the store."""
        with self._lock:
            records = bytes(self.records)
            if self._sealed_bytes == self.size_bytes:
                return records
        return records[: next((at for at in _starts(records) if records.startswith(_EMPTY_RECORD, at)), len(records))]

    def _hand_on(self, fd: int) -> None:
        """Have a pipe's content copied by the crew, but for the rest that is no whole part."""
        while (pipe := self._means.relay.take()) is not None:
            try:
                size = pipe.fill(fd)
            except BaseException:
                pipe.done(empty=False)
                raise
            if size < pipe.size_bytes:
                pipe.empty_into(self._room().view[:size])
                self._filled = size
                pipe.done(empty=True)
                return
            self._submit(size, pipe)

    def close(self) -> None:
        """Hand over what is left, and wait until all is out of the pipes; twice is fine. Raises the image's first
        failure."""
        if self.closed:
            return
        if self._filled or (self._pages and self._ends_inside_chunk):
            self._flush(last=True)
        if self._buffer is not None:
            self._means.buffers.give(self._buffer)
            self._buffer = None
        while self._fetching:
            self._fetching.popleft().wait()
        self.closed = True
        self._means.check()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """Close after success; after an exception the stream stays open, so that finish refuses the image."""
        if kind is None:
            self.close()

    @property
    def _ends_inside_chunk(self) -> bool:
        """Whether what has been handed over may end in the middle of a chunk."""
        return self._last is not None and not self._last.is_last

    def _room(self) -> Buffer:
        if self.closed:
            raise UsageError(reason=f"stream {self.name!r} is closed")
        if self._buffer is None:
            self._buffer = self._means.buffers.take()
        return self._buffer

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._part_bytes:
            self._flush()

    def _flush(self, last: bool = False) -> None:
        buffer, size = self._buffer, self._filled
        self._buffer, self._filled = None, 0
        self._submit(size, buffer, last)

    def _submit(self, size: int, source: Buffer | Source | None, last: bool = False) -> None:
        self._hand_over(
            Part(
                self._means,
                size,
                source,
                before=self._last,
                keep=self._keep,
                put=self._put,
                pages=self._pages,
                last=last,
            )
        )

    def _hand_over(self, part: Part) -> None:
        while self._fetching and self._fetching[0].is_fetched:
            self._fetching.popleft()
        self._fetching.append(part)
        if not self._crew.submit(part):
            part.drop()
            self._means.check()
            raise UsageError(reason=f"stream {self.name!r}: its image is finished")
        self._means.check()
        self._last = part
        self.size_bytes += part.size_bytes

    def _keep(self, count: int) -> int:
        with self._lock:
            number = len(self.records) // layout.RECORD.size
            self.records += _EMPTY_RECORD * count
        return number

    def _put(self, number: int, records: bytes) -> None:
        size = sum(record[2] for record in layout.RECORD.iter_unpack(records))
        with self._lock:
            self._sealed_bytes += size
            at = number * layout.RECORD.size
            self.records[at : at + len(records)] = records

    def renumber(self, numbers: dict[int, int]) -> None:
        """Sources that have got other numbers, 0 staying 0; no chunk is on its way any more."""
        if all(old == new for old, new in numbers.items()):
            return
        records = bytearray()
        for record in layout.RECORD.iter_unpack(self.records):
            offset, stored, plain, pack, source, kind, tag, name = record
            records += layout.RECORD.pack(offset, stored, plain, pack, numbers.get(source, 0), kind, tag, name)
        self.records = records

    def keep_only(self, records: bytes) -> None:
        """These are all that it holds; no chunk is on its way any more."""
        self.records = bytearray(records)
        self.size_bytes = sum(record[2] for record in layout.RECORD.iter_unpack(records))


def _starts(records: bytes) -> range:
    return range(0, len(records), layout.RECORD.size)
