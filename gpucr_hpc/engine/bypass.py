"""Large memory that CRIU is not shown: which pages there are, and where they are read.

Who calls: worker and capture. A plugin in CRIU (spank_plugin/criu_memory.c) connects to our socket and names, while the
tree is frozen, the pages of large private anonymous mappings, with a descriptor of /proc/PID/mem. CRIU leaves them out
of its pages and its pagemap. Here both are put together again, to what CRIU would have written by itself.

A packet is the pid inside the namespace and a count in 32 bits each, then so many begins and ends of ranges in 64 bits
each, in the machine's order. The first one of a process carries the descriptor; pid 0 says that the plugin is at work.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

from gpucr_hpc.engine import pagemap
from gpucr_hpc.engine.copier import Copier
from gpucr_hpc.engine.sealed import Chunk, SealedMemory, split
from gpucr_hpc.errors import ImageError, MemoryUnreadable
from gpucr_hpc.image.extents import Extent, Sealed
from gpucr_hpc.wire import peer_of

SOCKET = "memory.sock"
_PIPE_BYTES = 1 << 20
_HEAD = struct.Struct("=II")
_RANGE = struct.Struct("=QQ")
_MAX_PACKET_BYTES = 64 << 10


@dataclass
class _Process:
    """memory: its descriptor, -1 when closed; joined: how many of the ranges a pagemap has got."""

    memory: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    joined: int = 0


class Bypass:
    """The worker's end of the plugin. peer_uid: who CRIU is."""

    peer_uid = 0
    #: What reads the processes that it knows, instead of their descriptors.
    copier: Copier | None = None
    #: What of those was sealed before.
    sealed: SealedMemory | None = None

    def __init__(self, directory: Path) -> None:
        path = directory / SOCKET
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None
        self._lock = threading.Lock()
        self._processes: dict[int, _Process] = {}
        self._active = False
        self._ended = False
        self._failure: MemoryUnreadable | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Hear the plugin from now on."""
        self._thread.start()

    def close(self) -> None:
        """Hear nothing any more, and close what was handed over; twice is fine. Everything must be read, or the image
        aborted."""
        with self._lock:
            self._ended = True
        for sock in (self._listener, self._peer):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        if self._peer is not None:
            self._peer.close()
        if self.copier is not None:
            self.copier.close()
        for process in self._processes.values():
            if process.memory >= 0:
                os.close(process.memory)
            process.memory = -1

    @property
    def active(self) -> bool:
        """Whether the plugin is at work: it says so before CRIU asks for its first file. Raises MemoryUnreadable."""
        self._check()
        return self._active

    @property
    def size_bytes(self) -> int:
        """All that the plugin has named so far."""
        with self._lock:
            return sum(end - begin for process in self._processes.values() for begin, end in process.ranges)

    def join(self, pid: int, data: bytes, rest: int) -> tuple[bytes, list[Extent | Sealed]]:
        """The pagemap of a process as CRIU would have written it, and where the pages lie, in the order of the file.

        data: the pagemap as CRIU has written it, to its end. rest: a file with the pages of that. Raises
        MemoryUnreadable.
        """
        self._check()
        process = self._processes.get(pid)
        ranges = process.ranges if process is not None else []
        try:
            whole, runs = pagemap.merged(data, ranges)
        except ImageError as error:
            raise MemoryUnreadable(reason=f"process {pid}: {error}") from None
        if process is not None:
            process.joined = len(ranges)
        extents: list[Extent | Sealed] = []
        at = 0
        read = marks = None
        chunks: list[Chunk] = []
        if self.copier is not None and pid in self.copier.pids:
            read, marks = self.copier.memory(pid), self.copier.marks(pid)
            chunks = self.sealed.chunks(pid) if self.sealed is not None else []
        for address, size, ours in runs:
            if not ours:
                extents.append(Extent(rest, at, size))
                at += size
            elif read is not None and marks is not None:
                extents += split(address, size, chunks, read, marks)
            else:
                assert process is not None
                extents.append(Extent(process.memory, address, size))
        if at != os.fstat(rest).st_size:
            size = os.fstat(rest).st_size
            raise MemoryUnreadable(reason=f"process {pid}: CRIU gave {size} bytes, {at} expected")
        return whole, extents

    def check_complete(self) -> None:
        """At the dump's end: raise MemoryUnreadable unless all that the plugin has named is in a pagemap."""
        self._check()
        for pid, process in self._processes.items():
            if process.joined != len(process.ranges):
                raise MemoryUnreadable(reason=f"process {pid}: CRIU's pagemap lacks pages that its plugin has named")

    def _run(self) -> None:
        while self._hear():
            poll = select.poll()
            poll.register(self._peer or self._listener, select.POLLIN)
            if any(event & ~select.POLLIN for _, event in poll.poll()) and self._peer is None:
                return  # closed

    def _hear(self) -> bool:
        """Take all that the plugin has sent so far; whether more may come. What CRIU did after sending came later."""
        with self._lock:
            try:
                if self._peer is None and not self._ended:
                    self._accept()
                while self._peer is not None and not self._ended:
                    data, fds, _, _ = socket.recv_fds(self._peer, _MAX_PACKET_BYTES, 1)
                    if data:
                        self._take(data, fds)
                    else:
                        self._ended = True
            except BlockingIOError:
                return True
            except (OSError, struct.error) as error:
                self._failure, self._ended = MemoryUnreadable(reason=f"CRIU's plugin: {error}"), True
                if self._peer is not None:
                    with contextlib.suppress(OSError):  # the plugin must not wait for us
                        self._peer.shutdown(socket.SHUT_RDWR)
            return not self._ended

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        if peer_of(peer).uid != self.peer_uid:
            peer.close()
            raise OSError(f"the peer is not uid {self.peer_uid}")
        peer.setblocking(False)
        self._peer = peer

    def _check(self) -> None:
        self._hear()
        if self._failure is not None:
            raise self._failure

    def _take(self, data: bytes, fds: list[int]) -> None:
        pid, count = _HEAD.unpack_from(data)
        if not pid:
            self._active = True
            return
        if fds:
            os.set_inheritable(fds[0], False)
            if pid in self._processes:
                os.close(fds[0])
            else:
                self._processes[pid] = _Process(fds[0])
        if pid not in self._processes or len(data) != _HEAD.size + count * _RANGE.size:
            raise struct.error(f"bad packet about process {pid}")
        self._processes[pid].ranges += _RANGE.iter_unpack(data[_HEAD.size :])


def held(pipe: int) -> int:
    """A file in memory with all that a pipe gives."""
    file = os.memfd_create("rest", os.MFD_CLOEXEC)
    try:
        while os.splice(pipe, file, _PIPE_BYTES):
            pass
    except BaseException:
        os.close(file)
        raise
    return file
