"""gpucr-srun without a capsule: the test plays shepherd, agent and tasks."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from gpucr_hpc.wire import Frame, Type, make

from .capsule_lab import BUILD, LIMIT_S, Peer, exactly

ASAN, RELEASE = BUILD / "asan" / "gpucr-srun", BUILD / "gpucr-srun"
PROXY = ASAN if ASAN.exists() else RELEASE


def piece(kind: int, data: bytes = b"") -> bytes:
    """One piece of stdio on a task's connection."""
    return struct.pack("<BI", kind, len(data)) + data


class FakeTask:
    """A task's connection as the shepherd of its node makes it."""

    def __init__(self, port: int, token: str, rank: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self.sock.sendall(f"{token} {rank}\n".encode())

    def out(self, data: bytes) -> None:
        self.sock.sendall(piece(1, data))

    def err(self, data: bytes) -> None:
        self.sock.sendall(piece(2, data))

    def end(self) -> None:
        self.sock.sendall(piece(1) + piece(2))
        self.sock.shutdown(socket.SHUT_WR)

    def input(self) -> bytes | None:
        """The next piece of input; b"" is its end, None that of the connection."""
        try:
            kind, length = struct.unpack("<BI", exactly(self.sock, 5))
            assert kind == 0
            return exactly(self.sock, length)
        except EOFError:
            return None

    def all_input(self) -> bytes:
        data = b""
        while part := self.input():
            data += part
        return data

    def closed_by_proxy(self) -> bool:
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()


class ProxyLab:
    """A proxy, the shepherd's end of its connection, its tasks."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="gpucr-proxy."))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.dir / "s"))
        self.listener.listen()
        self.listener.settimeout(LIMIT_S)
        self.run: subprocess.Popen[bytes]
        self.peer: Peer | None = None
        self.tasks: list[FakeTask] = []

    def __enter__(self) -> ProxyLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "run"):
            if self.run.poll() is None:
                self.run.kill()
            self.run.wait()
            for stream in (self.run.stdin, self.run.stdout, self.run.stderr):
                if stream is not None:
                    stream.close()
        for task in self.tasks:
            task.close()
        if self.peer:
            self.peer.close()
        self.listener.close()
        shutil.rmtree(self.dir)

    def start(self, *argv: str, stdin: object = subprocess.DEVNULL, stdout: object = subprocess.PIPE,
              stderr: object = subprocess.PIPE, env: dict[str, str] | None = None) -> Frame:  # fmt: skip
        """Start the proxy; returns its SRUN."""
        self.run = subprocess.Popen(
            [str(PROXY), *argv],
            stdin=stdin,  # type: ignore[call-overload]
            stdout=stdout,
            stderr=stderr,
            cwd=self.dir,
            env={"PATH": "/usr/bin:/bin", "GPUCR_SHEPHERD": str(self.dir / "s"), "GPUCR_CAPSULE": "1", **(env or {})},
        )
        self.peer = Peer(self.listener.accept()[0])
        self.srun = self.peer.expect(Type.SRUN)
        return self.srun

    def say(self, kind: Type, *lists: tuple[str, list[str]], **fields: object) -> None:
        assert self.peer
        self.peer.send(make(kind, *lists, KEY=self.srun.get("KEY"), **fields))

    def plan(
        self, tasks: int, label: int = 0, stdin: str = "none", out: str = "", err: str = "", append: int = 0
    ) -> None:
        self.say(Type.PLAN, TASKS=tasks, LABEL=label, STDIN=stdin, STDOUT=out, STDERR=err, APPEND=append)

    def task(self, rank: int) -> FakeTask:
        task = FakeTask(self.srun.int("PORT"), self.srun.get("TOKEN"), rank)
        self.tasks.append(task)
        return task

    def end(self, status: int = 0) -> None:
        self.say(Type.SRUNEND, STATUS=status)

    def finish(self) -> tuple[int, bytes, bytes]:
        out, err = self.run.communicate(timeout=LIMIT_S)
        return self.run.returncode, out or b"", err or b""

    def fd_count(self) -> int:
        return len(os.listdir(f"/proc/{self.run.pid}/fd"))
