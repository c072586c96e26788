"""CRIU's side of `--stream`, as criu/img-streamer.c speaks it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


def request(name: bytes) -> bytes:
    """A request for a file: 32-bit length, then protobuf {1: name}."""
    length = bytes([len(name)]) if len(name) < 128 else bytes([len(name) & 0x7F | 0x80, len(name) >> 7])
    body = b"\x0a" + length + name
    return struct.pack("<I", len(body)) + body


class FakeCriu:
    """One connection to a streamer. Leaving it closes every descriptor, as the end of the process would."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.open: dict[str, int] = {}

    def __enter__(self) -> FakeCriu:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for fd in self.open.values():
            os.close(fd)
        self.sock.close()

    # --- dump ---------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Open a file of the image for writing."""
        self.sock.sendall(request(name.encode()))
        read, self.open[name] = os.pipe()
        socket.send_fds(self.sock, [b"\0"], [read])
        os.close(read)

    def write(self, name: str, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.open[name], left) :]

    def end(self, name: str) -> None:
        os.close(self.open.pop(name))

    def dump(self, files: dict[str, bytes], order: Sequence[int] = (), piece_bytes: int = 4096) -> None:
        """Write all files at once, a piece here and a piece there; inventory.img comes last, as in CRIU."""
        left = {name: memoryview(data) for name, data in files.items()}
        for name in left:
            self.begin(name)
        turn = 0
        while left:
            name = list(left)[(order[turn % len(order)] if order else turn) % len(left)]
            self.write(name, bytes(left[name][:piece_bytes]))
            left[name] = left[name][piece_bytes:]
            if not left[name]:
                del left[name]
                self.end(name)
            turn += 1
        self.begin("inventory.img")
        self.write("inventory.img", b"inventory")
        self.end("inventory.img")

    # --- restore ------------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """A whole file of the image, or None when the streamer says that there is none."""
        self.sock.sendall(request(name.encode()))
        answer = self.sock.recv(6, socket.MSG_WAITALL)
        assert answer[:5] == b"\x02\0\0\0\x08", answer
        if not answer[5]:
            return None
        read, write = os.pipe()
        socket.send_fds(self.sock, [b"\0"], [write])
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            return pipe.read()
