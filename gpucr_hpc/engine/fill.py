"""Writes memory into a restored tree that stands still, with several threads.

Who calls: the worker, on the agent's order in CRIU's hook `post-restore`. What is written is in `fillplan`. The worker
may not touch the job's processes by itself; it writes through descriptors of /proc/PID/mem that the agent has opened.
Pages are charged to the process that has the memory, and lie on the memory node of the thread that writes them first:
so the threads keep to the nodes of the job's processors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpucr_hpc.engine.fillplan import Part
from gpucr_hpc.errors import RestoreFailed
from gpucr_hpc.image.chunks import ChunkKind
from gpucr_hpc.image.files import default_workers
from gpucr_hpc.image.reader import ImageReader

#: A thread takes this much of one process at a time: with less two of them would often be in one huge page.
SPAN_BYTES = 4 << 20

_NODES = Path("/sys/devices/system/node")


def fill(
    reader: ImageReader,
    parts: Sequence[Part],
    memories: Mapping[int, int],
    stopped: threading.Event,
    processors: Sequence[int] = (),
) -> int:
    """Write what of `parts` is not zero; the bytes written. Each thread has three buffers of a chunk.

    memories: descriptors of /proc/PID/mem by pid inside the namespace. stopped: set by another thread, it ends the
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
            for part, number, offset in spans:
                if stopped.is_set():
                    raise RestoreFailed(reason="the fill of its memory was given up", log="none")
                if failed.is_set():
                    break
                written += _write(reader, part, number, offset, memories[part.pid])
        except BaseException:
            failed.set()
            raise
        return written

    threads = default_workers()
    with ThreadPoolExecutor(threads, thread_name_prefix="fill") as pool:
        return sum(done.result() for done in [pool.submit(work) for _ in range(threads)])


class _Spans:
    """Hands out chunks and their offsets: each iterator gets neighbours, SPAN_BYTES of them, before it asks again."""

    def __init__(self, parts: Sequence[Part], reader: ImageReader) -> None:
        self._lock = threading.Lock()
        self._spans = (span for part in parts for span in _cut(part, reader))

    def __iter__(self) -> Iterator[tuple[Part, int, int]]:
        while True:
            with self._lock:
                span = next(self._spans, None)
            if span is None:
                return
            yield from span


def _cut(part: Part, reader: ImageReader) -> Iterator[list[tuple[Part, int, int]]]:
    span: list[tuple[Part, int, int]] = []
    for number, (offset, _, kind) in enumerate(reader.index.streams[part.pages].places()):
        if span and offset >= span[0][2] + SPAN_BYTES:
            yield span
            span = []
        if number in part.left_out and kind != ChunkKind.ZERO:  # as fresh memory is
            span.append((part, number, offset))
    if span:
        yield span


def _write(reader: ImageReader, part: Part, number: int, offset: int, memory: int) -> int:
    """Put one chunk into its places; its size in bytes."""
    written = 0

    def put(piece: memoryview) -> None:
        nonlocal written
        for begin, end, address in part.addresses(offset, len(piece)):
            _write_all(part.pid, memory, piece[begin:end], address)
            written += end - begin

    reader.use(part.pages, number, put)
    return written


def _write_all(pid: int, memory: int, data: memoryview, address: int) -> None:
    while data:
        try:
            count = os.pwrite(memory, data, address)
        except OSError as error:
            raise RestoreFailed(
                reason=f"memory of process {pid} at {address:#x} cannot be filled: {error.strerror}", log="none"
            ) from None
        if not count:
            reason = f"process {pid} died while its memory was filled; is the job's memory limit too small?"
            raise RestoreFailed(reason=reason, log="none")
        data, address = data[count:], address + count


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
