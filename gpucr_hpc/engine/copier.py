"""Moves memory of processes that stand still: gpucr-copier (spank_plugin/copier.c) and its two users.

Who calls: dump and refill start it (`started`), the worker uses it (`Copier`) in bypass and fill. process_vm_readv
moves several times as much as /proc/PID/mem, but needs the right to trace, which the worker must not have. Where the
program is missing, or a process is not known to it, memory goes through /proc/PID/mem.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import queue
import socket
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import MemoryUnreadable
from gpucr_hpc.image.buffers import Buffer, address_of, copy_out
from gpucr_hpc.image.chunks import CHUNK_BYTES, TAG_BYTES
from gpucr_hpc.image.extents import Marks, Read
from gpucr_hpc.image.files import default_workers
from gpucr_hpc.log import Log

PROGRAM = Path("/usr/lib/gpucr/gpucr-copier")
#: What a thread writes at a time: with less two would often be in one huge page.
SPAN_BYTES = 8 << 20
WINDOW_BYTES = SPAN_BYTES + CHUNK_BYTES
#: Memory that the image's buffers may be in, besides the lanes' own.
POOL_BYTES = 96 << 20
#: Processes beyond are left to /proc/PID/mem; each costs a descriptor.
MAX_PROCESSES = 256
_PIECE_BYTES = 1 << 20  # read at a time: it is copied on while it is in the processor's cache
_MAX_SPANS = 1024
_MAX_WRITERS = 14  # on 16 processors 8 threads wrote 7.8 GB/s, 12 11.8, 14 14.2, 16 no more
_HEAD, _SPAN, _ANSWER, _COUNT = (struct.Struct(kind) for kind in ("=IIII32s", "=QQQ", "=iIQ", "=Q"))
_MOVE, _MARK = range(2)
_MAX_ANSWER_BYTES = _ANSWER.size + _MAX_SPANS * TAG_BYTES
#: What it says with --version, and when it is ready (copier.c).
READY = b"gpucr-copier 2\n"

log = Log(__name__)


@contextlib.asynccontextmanager
async def started(
    worker: WorkerClient, pids: Mapping[int, int], *, write: bool, processors: Collection[int] = ()
) -> AsyncIterator[Callable[[], int]]:
    """Let a worker read or write memory of processes, for the time of the block; yields what tells the bytes so far.
    pids: by the number inside the namespace, those on the host. processors: on which it works, any by default. Where
    it cannot be started that is in the log. Raises HostError when the worker is gone."""
    async with AsyncExitStack() as stack:
        moved: Callable[[], int] = int  # nothing
        if PROGRAM.is_file() and pids:
            try:
                moved = await _start(stack, worker, pids, write, processors)
            except OSError as error:
                log.warning("memory goes through /proc/PID/mem", program=PROGRAM, error=str(error))
        yield moved


async def _start(
    stack: AsyncExitStack, worker: WorkerClient, pids: Mapping[int, int], write: bool, processors: Collection[int]
) -> Callable[[], int]:
    with ExitStack() as handed:
        window = os.memfd_create("copier", os.MFD_CLOEXEC)
        handed.callback(os.close, window)
        pairs = []
        for _ in range(default_workers(_MAX_WRITERS) if write else 2 * default_workers()):
            pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for end in pairs[-1]:
                handed.callback(end.close)
        size = WINDOW_BYTES * len(pairs) + (0 if write else POOL_BYTES)
        os.truncate(window, size + mmap.PAGESIZE)
        counts = mmap.mmap(window, mmap.PAGESIZE, prot=mmap.PROT_READ, offset=size)
        known = {}
        for nspid, pid in list(pids.items())[:MAX_PROCESSES]:
            with contextlib.suppress(ProcessLookupError):
                known[nspid] = (pid, os.pidfd_open(pid))
                handed.callback(os.close, known[nspid][1])
        theirs = [pair[1].fileno() for pair in pairs]
        process = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "write" if write else "read", str(window), str(size)),
            ",".join(map(str, sorted(processors))) or "-",
            ",".join(map(str, theirs)),
            ",".join(f"{nspid}:{pid}:{pidfd}" for nspid, (pid, pidfd) in known.items()),
            pass_fds=(window, *theirs, *(pidfd for _, pidfd in known.values())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=proc.clean_env(),
            start_new_session=True,
        )
        stack.push_async_callback(proc.end, process)
        assert process.stdout is not None
        said = await process.stdout.readline()
        if said != READY:
            raise OSError(f"it says {said.decode(errors='replace')!r} instead of {READY.decode()!r}")
        await worker.call("copier", [window, *(pair[0].fileno() for pair in pairs)], pids=list(known))
    return lambda: sum(count for (count,) in _COUNT.iter_unpack(counts))


class Lane:
    """One thread's way to the program. buffer: memory of its own in the window, which begins at `at`."""

    def __init__(self, sock: socket.socket, buffer: Buffer, at: int) -> None:
        self._sock, self.buffer, self.at = sock, buffer, at

    def move(self, nspid: int, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
        """Spans (place in the buffer, address, bytes): 0, or an error number and the address where. ESRCH: the process
        is gone; EPIPE: the program is."""
        return self.move_at(nspid, [(self.at + at, address, size) for at, address, size in spans])

    def move_at(self, nspid: int, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
        """As `move`, with places in the window."""
        for first in range(0, len(spans), _MAX_SPANS):
            some = spans[first : first + _MAX_SPANS]
            self.ask(nspid, some)
            status, address, _ = self.answer(some)
            if status:
                return status, address
        return 0, 0

    def ask(self, nspid: int, spans: Sequence[tuple[int, int, int]], key: bytes | None = None) -> None:
        """Send a request of at most _MAX_SPANS spans, whose answer must be taken; with a key their marks are wanted."""
        head = _HEAD.pack(nspid, len(spans), _MOVE if key is None else _MARK, 0, key or b"")
        with contextlib.suppress(OSError):  # there is no answer then
            self._sock.send(head + b"".join(_SPAN.pack(*span) for span in spans))

    def answer(self, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int, list[bytes]]:
        """What came of a request with these spans, as `move` has it, and the marks."""
        try:
            answer = self._sock.recv(_MAX_ANSWER_BYTES)
        except OSError:
            answer = b""
        if not answer:
            return errno.EPIPE, spans[0][1], []
        status, _, address = _ANSWER.unpack_from(answer)
        return status, address, [answer[at : at + TAG_BYTES] for at in range(_ANSWER.size, len(answer), TAG_BYTES)]

    def close(self) -> None:
        self._sock.close()


class Copier:
    """The worker's side. window, sockets: as `started` hands them over. pids: those that it can name. lanes: how many
    threads may move something at the same time."""

    def __init__(self, window: int, sockets: Sequence[int], pids: Collection[int]) -> None:
        self.pids, self.lanes = frozenset(pids), len(sockets)
        self.window = mmap.mmap(window, os.fstat(window).st_size - mmap.PAGESIZE)
        begins = [number * WINDOW_BYTES for number in range(len(sockets))]
        self._lanes = [
            Lane(socket.socket(fileno=os.dup(fd)), Buffer(WINDOW_BYTES, self.window, begin), begin)
            for fd, begin in zip(sockets, begins, strict=True)
        ]
        #: Where in the window memory begins that is nobody's: who reads into it saves a copy.
        self.pool_begins = len(sockets) * WINDOW_BYTES
        self._begins = self._lanes[0].buffer.address
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane of one's own, after waiting for one."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def memory(self, nspid: int) -> Read:
        """Reads ranges (address, bytes) of a process, one after another, into memory of their size; raises
        MemoryUnreadable."""

        def read(ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
            at = address_of(target) - self._begins
            with self.lane() as lane:
                if 0 <= at <= len(self.window) - len(target):
                    status, address = lane.move_at(nspid, _one_after_another(ranges, at))
                    if status:
                        raise MemoryUnreadable(reason=f"{os.strerror(status)} at {address:#x}")
                    return
                for spans, size in _pieces(ranges):
                    status, address = lane.move(nspid, spans)
                    if status:
                        raise MemoryUnreadable(reason=f"{os.strerror(status)} at {address:#x}")
                    copy_out(lane.buffer, size, target)
                    target = target[size:]

        return read

    def marks(self, nspid: int) -> Marks:
        """Marks chunks of a process; raises MemoryUnreadable."""

        def mark(key: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            found: list[bytes] = []
            spans = [(0, address, size) for address, size in ranges]
            with contextlib.ExitStack() as stack:
                lanes = [stack.enter_context(self.lane()), *self._others(stack)]
                most = min(_MAX_SPANS, -(-len(spans) // len(lanes)))
                while spans:
                    asked = [spans[at * most :][:most] for at in range(len(lanes)) if at * most < len(spans)]
                    for lane, some in zip(lanes, asked, strict=False):
                        lane.ask(nspid, some, key)
                    answers = [lane.answer(some) for lane, some in zip(lanes, asked, strict=False)]
                    for status, address, marks in answers:
                        if status:
                            raise MemoryUnreadable(reason=f"{os.strerror(status)} at {address:#x}")
                        found += marks
                    del spans[: len(lanes) * most]
            return found

        return mark

    def _others(self, stack: contextlib.ExitStack) -> Iterator[Lane]:
        """One lane more, if nobody is in it."""
        with contextlib.suppress(queue.Empty):
            lane = self._free.get_nowait()
            stack.callback(self._free.put, lane)
            yield lane

    def close(self) -> None:
        """The program ends then. Nobody may be in a lane; twice is fine."""
        for lane in self._lanes:
            lane.close()


def or_zeros(read: Read) -> Read:
    """As `read`, but what cannot be read is zero: of a process that runs, memory may be gone in any moment."""

    def forgiving(ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
        try:
            read(ranges, target)
        except MemoryUnreadable:
            target[:] = bytes(len(target))

    return forgiving


def _one_after_another(ranges: Sequence[tuple[int, int]], at: int) -> list[tuple[int, int, int]]:
    spans = []
    for address, size in ranges:
        spans.append((at, address, size))
        at += size
    return spans


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, int, int]], int]]:
    """Ranges as spans of a buffer, _PIECE_BYTES and _MAX_SPANS at most at a time, with their bytes."""
    spans: list[tuple[int, int, int]] = []
    at = 0
    for begin, length in ranges:
        address, left = begin, length
        while left:
            count = min(left, _PIECE_BYTES - at)
            spans.append((at, address, count))
            address, left, at = address + count, left - count, at + count
            if at == _PIECE_BYTES or len(spans) == _MAX_SPANS:
                yield spans, at
                spans, at = [], 0
    if spans:
        yield spans, at
