"""Pages on their way from one pipe to several threads.

Who calls: streams and parts. Who reads a pipe copies, and one thread that copies all memory of a job bounds the dump.
So the one that watches CRIU's pipe only moves references to pages on (splice), into pipes of our own, and the thread
that seals them copies them out of there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable

from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.files import wait_for, widen_pipe


class Pipe:
    """A pipe for whole pages. part_bytes: as many as it shall take. size_bytes: so many, or CHUNK_BYTES where the
    kernel lets it have no more, or less. give_back: what `done` calls, with it and whether it is empty."""

    def __init__(self, give_back: Callable[[Pipe, bool], None], part_bytes: int) -> None:
        self._give_back = give_back
        self._source, self._sink = os.pipe2(os.O_CLOEXEC)
        widen_pipe(self._source)
        self.size_bytes = min(part_bytes, widen_pipe(self._source, part_bytes))

    def fill(self, fd: int) -> int:
        """Move up to size_bytes on from another pipe; how many. Fewer at its end, or when what it holds is not in
        whole pages, so that more does not fit in here. Waits, but never for a reader of this pipe. Raises OSError."""
        size, waited = 0, False
        while size < self.size_bytes:
            try:
                got = os.splice(fd, self._sink, self.size_bytes - size, flags=os.SPLICE_F_NONBLOCK if size else 0)
            except BlockingIOError:
                if size and waited:
                    break
                wait_for(fd, select.POLLIN)
                waited = True
                continue
            if not got:
                break
            size, waited = size + got, False
        return size

    def empty_into(self, room: memoryview) -> None:
        """Read as much as `room` takes; it is there."""
        while room:
            room = room[os.readv(self._source, [room]) :]

    def done(self, *, empty: bool) -> None:
        """Nobody needs it any more."""
        self._give_back(self, empty)

    def close(self) -> None:
        """Both ends, and what is still in between."""
        os.close(self._source)
        os.close(self._sink)


class Relay:
    """Up to `limit` pipes, made when the first one is needed; none where the kernel lets none become large enough (a
    user's pipes are counted), and none after `close`."""

    def __init__(self, limit: int, part_bytes: int = CHUNK_BYTES) -> None:
        self._limit, self._part_bytes = limit, part_bytes
        self._free: queue.SimpleQueue[Pipe | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._made = self._closed = False

    def take(self) -> Pipe | None:
        """An empty pipe; waits until one is given back."""
        with self._lock:
            if not self._made:
                self._made = True
                self._make()
        pipe = self._free.get()
        if pipe is None:
            self._free.put(None)  # for whoever else waits, or comes later
        return pipe

    def _make(self) -> None:
        made = 0
        with contextlib.suppress(OSError):  # no descriptors left
            while made < self._limit and (pipe := Pipe(self._give, self._part_bytes)).size_bytes >= CHUNK_BYTES:
                self._free.put(pipe)
                made += 1
            if made < self._limit:
                pipe.close()
        if not made:
            self._free.put(None)

    def _give(self, pipe: Pipe, empty: bool) -> None:
        with self._lock:
            if empty and not self._closed:
                self._free.put(pipe)
                return
        pipe.close()

    def close(self) -> None:
        """Let nobody wait any more; twice is fine."""
        with self._lock:
            self._made = self._closed = True
            while not self._free.empty():
                pipe = self._free.get()
                if pipe is not None:
                    pipe.close()
            self._free.put(None)
