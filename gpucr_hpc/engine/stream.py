"""The far end of CRIU's `--stream`: CRIU's file requests on one side, an image on the other.

Protocol (criu/img-streamer.c): CRIU connects to a Unix socket in its images directory. For each file it sends a
protobuf request {1: name} behind a 32-bit length; on a dump followed by one byte that carries the read end of a
pipe, on a restore answered by {1: exists}, after which CRIU sends the write end. The end of the pipe is the end of
the file. There is no error message in band: closing the connection makes CRIU fail, and undo a dump.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucr_hpc.engine import bypass, pagemap
from gpucr_hpc.engine.fillplan import Part
from gpucr_hpc.engine.renumber import Renumbered
from gpucr_hpc.errors import GpucrError, ImageError
from gpucr_hpc.image.files import widen_pipe
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.wire import peer_of

CAPTURE_SOCKET = "streamer-capture.sock"
SERVE_SOCKET = "streamer-serve.sock"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PAGES = re.compile(r"pages-[0-9]+\.img")
_PAGEMAP = re.compile(r"pagemap-([0-9]+)\.img")
_MAX_REQUEST_BYTES = 4096
#: The pipe for a process's memory, where fs.pipe-max-size allows it. CRIU collects 8 MiB, then passes them on: with a
#: smaller pipe both ends wait for each other many times.
MEMORY_PIPE_BYTES = 8 << 20
_MAX_PIPE = Path("/proc/sys/fs/pipe-max-size")
_LAST_FILE = "inventory.img"  # CRIU writes it after every other one


def listen(directory: Path, name: str) -> socket.socket:
    """Bind the socket to which CRIU will connect; a stale one is replaced."""
    path = directory / name
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1)
    return listener


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer at the end of the stream. Never reads ahead: the next byte may carry a descriptor."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            break
        data += part
    return data


def _read_request(sock: socket.socket) -> str | None:
    """The name of the next file, or None when CRIU has closed the connection."""
    head = _read_exactly(sock, 4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if not 2 < length <= _MAX_REQUEST_BYTES:
        raise ImageError(path="CRIU stream", reason=f"request of {length} bytes")
    body = _read_exactly(sock, length)
    if len(body) < length:
        return None
    # One field: tag 0x0a, a length of at most two varint bytes (names are short), the name.
    start = 2 if body[1] < 0x80 else 3
    name = body[start:].decode("ascii", "replace")
    if body[0] != 0x0A or not _NAME.fullmatch(name):
        raise ImageError(path="CRIU stream", reason=f"bad request {body[:40]!r}")
    return name


def _receive_descriptor(sock: socket.socket) -> int:
    data, fds, _flags, _address = socket.recv_fds(sock, 1, 1)
    if not data or len(fds) != 1:
        raise ImageError(path="CRIU stream", reason="a descriptor did not arrive")
    os.set_inheritable(fds[0], False)
    widen_pipe(fds[0])
    return fds[0]


def pipe_limit() -> int:
    """How large the kernel lets a process without privilege make a pipe, in bytes. Raises OSError."""
    return int(_MAX_PIPE.read_text())


def raise_pipe_limit(size_bytes: int) -> None:
    """Let it be at least so much, on the whole node. What all pipes of a user may hold stays limited by
    fs.pipe-user-pages-soft. Raises OSError."""
    if pipe_limit() < size_bytes:
        _MAX_PIPE.write_text(str(size_bytes))


class _Connection(abc.ABC):
    """Accepts CRIU's one connection in a thread and pumps each of its files in another."""

    peer_uid = 0  # CRIU runs with the user's real and root's effective id, which is the one that counts here

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._open = 0
        self.failure: Exception | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def abort(self) -> None:
        """Break the stream, which makes CRIU fail and undo."""
        for sock in (self._socket, self._listener):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._socket, _ = self._listener.accept()
            self._listener.close()
            if peer_of(self._socket).uid != self.peer_uid:
                raise ImageError(path="CRIU stream", reason=f"the peer is not uid {self.peer_uid}")
            while (name := _read_request(self._socket)) is not None:
                self._request(self._socket, name)
        except OSError as error:
            self._fail(ImageError(path="CRIU stream", reason=error))
        except Exception as error:
            self._fail(error)
        finally:
            self._listener.close()
            if self._socket is not None:
                self._socket.close()
            with self._changed:
                self.closed = True
                self._changed.notify_all()

    @abc.abstractmethod
    def _request(self, sock: socket.socket, name: str) -> None:
        """Answer a request for a file, and start its pump."""

    @abc.abstractmethod
    def _pump(self, name: str, fd: int) -> None:
        """Move a whole file between a pipe and the image."""

    def _start_pump(self, name: str, fd: int) -> None:
        with self._changed:
            self._open += 1
        threading.Thread(target=self._pumped, args=(name, fd), daemon=True).start()

    def _pumped(self, name: str, fd: int) -> None:
        try:
            self._pump(name, fd)
        except Exception as error:
            self._fail(error)
        finally:
            os.close(fd)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()
        self.abort()

    def check(self) -> None:
        """Raise what went wrong in a thread, if anything did."""
        if self.failure is not None:
            if isinstance(self.failure, GpucrError):
                raise self.failure
            raise ImageError(path="CRIU stream", reason=repr(self.failure))


class Capture(_Connection):
    """Takes a dump into an image. memory: hears of large memory that CRIU does not give."""

    def __init__(self, listener: socket.socket, writer: ImageWriter, memory: bypass.Bypass | None = None) -> None:
        super().__init__(listener)
        self._writer, self._memory = writer, memory
        self._last = ""
        self._maps: dict[int, bytes] = {}
        self._owners: dict[str, int] = {}
        self.pagemaps: dict[int, pagemap.PageMap] = {}
        self.names: list[str] = []
        self.began: float | None = None

    def _request(self, sock: socket.socket, name: str) -> None:
        if self.began is None:
            self.began = time.monotonic()  # CRIU opens its first file when every task has stopped
            if self._memory is not None and not self._memory.active:
                self._memory = None
        # CRIU opens the pages of a process right after its pagemap, and one process after the other (page-xfer.c).
        owner = _PAGEMAP.fullmatch(self._last)
        if owner is not None and _PAGES.fullmatch(name) and self._memory is not None:
            self._owners[name] = int(owner[1])
        self._last = name
        fd = _receive_descriptor(sock)
        if _PAGES.fullmatch(name):
            widen_pipe(fd, MEMORY_PIPE_BYTES)
        self._start_pump(name, fd)
        with self._changed:  # only now: whoever sees the last name must see its pump, too
            self.names.append(name)
            self._changed.notify_all()

    def _pump(self, name: str, fd: int) -> None:
        found = _PAGEMAP.fullmatch(name)
        if found is not None:
            with open(fd, "rb", closefd=False) as source:
                data = source.read()
            with self._changed:
                self._maps[int(found[1])] = data
                self._changed.notify_all()
            if self._memory is None:
                self._put_pagemap(int(found[1]), data)
        elif name in self._owners:
            self._put_memory(name, self._owners[name], fd)
        else:
            with self._writer.stream(name, pages=_PAGES.fullmatch(name) is not None) as file:
                file.copy_fd(fd)

    def _put_pagemap(self, pid: int, data: bytes) -> None:
        with self._writer.stream(f"pagemap-{pid}.img") as file:
            file.write(data)
        self.pagemaps[pid] = pagemap.parse(data)

    def _put_memory(self, name: str, pid: int, fd: int) -> None:
        """All pages of a process: those in the pipe, which wait until their places are known, and those that CRIU was
        not shown."""
        assert self._memory is not None
        rest = bypass.held(fd)
        try:
            with self._changed:
                self._changed.wait_for(lambda: pid in self._maps or self.failure is not None)
                self.check()
                data = self._maps[pid]
            data, extents = self._memory.join(pid, data, rest)
            self._put_pagemap(pid, data)
            with self._writer.stream(name, pages=True) as file:
                file.copy_extents(extents)
        finally:
            os.close(rest)

    def drain(self, timeout_s: float) -> list[str]:
        """Wait until every byte of the dump is in our memory or beyond; return the names of the files.

        Until then pages in the pipes are the job's own live pages (vmsplice), and letting the job run would change
        the image. Raises ImageError when the stream failed, ended early or took longer than timeout_s.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.failure is not None or (self._open == 0 and (_LAST_FILE in self.names or self.closed)),
                timeout_s,
            )
        self.check()
        if not done or _LAST_FILE not in self.names or set(self._maps) != set(self.pagemaps):
            raise ImageError(path="CRIU stream", reason="the dump ended before its last file")
        if self._memory is not None:
            self._memory.check_complete()
        return list(self.names)


class Serve(_Connection):
    """Gives an image to a restore. A name may be asked for again; an unknown one does not exist."""

    def __init__(
        self,
        listener: socket.socket,
        reader: ImageReader,
        patches: pagemap.Patches,
        parts: Sequence[Part] = (),
        renumbered: Renumbered | None = None,
        changed: Mapping[str, bytes] | None = None,
    ) -> None:
        """parts: memory that somebody else restores. renumbered: the holder under another number. changed: what CRIU
        gets in place of other streams."""
        super().__init__(listener)
        self._reader, self._patches = reader, patches
        holder = renumbered or Renumbered({}, {})
        self._names = {name: name for name in reader.names()} | holder.names
        self._replaced = {part.pagemap_name: part.pagemap for part in parts} | holder.tree | dict(changed or {})
        self._left_out = {part.pages: part.left_out for part in parts}

    def _request(self, sock: socket.socket, name: str) -> None:
        stored = self._names.get(name)
        sock.sendall(struct.pack("<I", 2) + bytes([0x08, stored is not None]))
        if stored is not None:
            self._start_pump(stored, _receive_descriptor(sock))

    def _pump(self, name: str, fd: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # CRIU may stop reading; it decides whether that is an error
            if name in self._replaced:
                with open(fd, "wb", closefd=False) as target:
                    target.write(self._replaced[name])
                return
            # CRIU reads memory; what was in the job's pipes it splices into new ones (criu/pipes.c).
            self._reader.copy_to_fd(
                name,
                fd,
                self._patches.get(name, ()),
                lending=_PAGES.fullmatch(name) is not None,
                without=self._left_out.get(name, ()),
            )
