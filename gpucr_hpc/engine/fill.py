"""Writes memory into a restored tree that stands still, with several threads.

Who calls: the worker, on the agent's order in CRIU's hook `post-restore`. What is written is in `fillplan`. The worker
may not touch the job's processes by itself; it writes through gpucr-copier (copier.py), or through descriptors of
/proc/PID/mem that the agent has opened.
Pages are charged to the process that has the memory, and lie on the memory node of the thread that writes them first:
so the threads keep to the nodes of the job's processors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpucr_hpc.engine.copier import SPAN_BYTES, WINDOW_BYTES, Copier
from gpucr_hpc.engine.fillplan import Part
from gpucr_hpc.errors import RestoreFailed
from gpucr_hpc.image.buffers import Buffer
from gpucr_hpc.image.chunks import ChunkKind
from gpucr_hpc.image.files import default_workers, write_spans
from gpucr_hpc.image.native import SHORT
from gpucr_hpc.image.reader import ImageReader

#: Writes spans (place in a buffer, address, bytes) to a process: 0, or an error number or SHORT and the address where.
Put = Callable[[int, Sequence[tuple[int, int, int]]], tuple[int, int]]

_NODES = Path("/sys/devices/system/node")


def fill(
    reader: ImageReader,
    parts: Sequence[Part],
    memories: Mapping[int, int],
    stopped: threading.Event,
    processors: Sequence[int] = (),
    copier: Copier | None = None,
) -> int:
    """Write what of `parts` is not zero; the bytes written. Each thread has a buffer for a span and three
    of a chunk.

    memories: descriptors of /proc/PID/mem by pid inside the namespace; copier: what writes instead, if it is there.
    stopped: set by another thread, it ends the
    fill. processors: those of the job. Raises RestoreFailed when a process is gone or the fill was stopped,
    IntegrityError for a damaged chunk, StoreError: then some of the memory is written.
    """
    near = _near(processors)
    spans = _Spans(parts, reader)
    failed = threading.Event()

    def work() -> int:
        if near:
            with contextlib.suppress(OSError):  # none of them is allowed here
                os.sched_setaffinity(0, near)
        written = 0
        try:
            with _way(copier, memories) as (room, put):
                for span in spans:
                    if stopped.is_set():
                        raise RestoreFailed(reason="the fill of its memory was given up", log="none")
                    if failed.is_set():
                        break
                    written += _write(reader, span, put, room)
        except BaseException:
            failed.set()
            raise
        return written

    threads = copier.lanes if copier is not None else default_workers()
    with ThreadPoolExecutor(threads, thread_name_prefix="fill") as pool:
        return sum(done.result() for done in [pool.submit(work) for _ in range(threads)])


@contextlib.contextmanager
def _way(copier: Copier | None, memories: Mapping[int, int]) -> Iterator[tuple[Buffer, Put]]:
    """A buffer, and what writes out of it."""
    if copier is not None:
        with copier.lane() as lane:
            yield lane.buffer, lane.move
    else:
        room = Buffer(WINDOW_BYTES)
        yield room, lambda pid, spans: write_spans(memories[pid], room, spans)


class Span(NamedTuple):
    """Chunks of one process: their numbers, and where they begin in its pages file."""

    part: Part
    numbers: list[int]
    offsets: list[int]


class _Spans:
    """Hands out neighbours, SPAN_BYTES of them and what more the last chunk has; any number of threads may ask. With
    less two threads would often be in one huge page."""

    def __init__(self, parts: Sequence[Part], reader: ImageReader) -> None:
        self._lock = threading.Lock()
        self._spans = (span for part in parts for span in _cut(part, reader))

    def __iter__(self) -> Iterator[Span]:
        while True:
            with self._lock:
                span = next(self._spans, None)
            if span is None:
                return
            yield span


def _cut(part: Part, reader: ImageReader) -> Iterator[Span]:
    numbers: list[int] = []
    offsets: list[int] = []
    for number, (offset, _, kind) in enumerate(reader.index.streams[part.pages].places()):
        if offsets and offset >= offsets[0] + SPAN_BYTES:
            yield Span(part, numbers, offsets)
            numbers, offsets = [], []
        if number in part.left_out and kind != ChunkKind.ZERO:  # as fresh memory is
            numbers.append(number)
            offsets.append(offset)
    if numbers:
        yield Span(part, numbers, offsets)


def _write(reader: ImageReader, span: Span, put: Put, room: Buffer) -> int:
    """Put chunks into their places; their size in bytes."""
    part = span.part
    spans: list[tuple[int, int, int]] = []
    for offset, at, size in _joined(span.offsets, reader.open_into(part.pages, span.numbers, room)):
        spans += ((at + begin, address, end - begin) for begin, end, address in part.addresses(offset, size))
    status, address = put(part.pid, spans)
    if status in (SHORT, errno.ESRCH):
        reason = f"process {part.pid} died while its memory was filled; is the job's memory limit too small?"
        raise RestoreFailed(reason=reason, log="none")
    if status:
        reason = f"memory of process {part.pid} at {address:#x} cannot be filled: {os.strerror(status)}"
        raise RestoreFailed(reason=reason, log="none")
    return sum(size for _, _, size in spans)


def _joined(offsets: Sequence[int], places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Offset in the pages file, place in the buffer and bytes of chunks; neighbours as one."""
    first, begin, length = offsets[0], 0, 0
    for offset, (at, size) in zip(offsets, places, strict=True):
        if offset != first + length:
            yield first, begin, length
            first, begin, length = offset, at, 0
        length += size
    yield first, begin, length


def _near(processors: Sequence[int]) -> set[int]:
    """All processors of the memory nodes to which some belong; none where there is only one node."""
    near: set[int] = set()
    nodes = list(_NODES.glob("node[0-9]*/cpulist"))
    for node in nodes if len(nodes) > 1 else ():
        there = set(_listed(node.read_text()))
        if there & set(processors):
            near |= there
    return near


def _listed(text: str) -> Iterator[int]:
    """Numbers of a list such as 0-3,8."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
