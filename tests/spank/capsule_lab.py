"""A capsule on this machine without Slurm: the test plays the agent and slurmstepd."""

from __future__ import annotations

import array
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from gpucr_hpc import wire
from gpucr_hpc.wire import Frame, Type, make

BUILD = Path(__file__).resolve().parents[2] / "spank_plugin" / "build"
INIT, TASK = BUILD / "gpucr-init", BUILD / "gpucr-task"
USER = 65534
LIMIT_S = 15.0


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Poll until condition() is true; fail after limit_s."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not (nobody may be there to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status as a mapping."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {k: v.strip() for k, _, v in (line.partition(":") for line in lines)}


def fds_of(pid: int) -> dict[int, str]:
    """What each descriptor of a process is."""
    return {int(p.name): os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()}


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes; EOFError when it ends before."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class Peer:
    """Frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(LIMIT_S)

    def receive(self) -> Frame:
        """The next frame; EOFError at the end."""
        kind, length = wire.parse_header(exactly(self.sock, wire.HEADER.size))
        return wire.parse_payload(kind, exactly(self.sock, length))

    def expect(self, kind: Type) -> Frame:
        frame = self.receive()
        assert kind == frame.type, frame
        return frame

    def send(self, frame: Frame, fds: Iterable[int] = ()) -> None:
        passed = array.array("i", fds)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else []
        data = wire.encode(frame)
        sent = self.sock.sendmsg([data], control)
        if sent < len(data):
            self.sock.sendall(data[sent:])

    def close(self) -> None:
        self.sock.close()

    @classmethod
    def to(cls, path: str | Path) -> Peer:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        return cls(sock)


class Lab:
    """Run directory, agent socket, one capsule."""

    def __init__(self, uid: int = USER) -> None:
        self.uid = uid
        self.dir = Path(tempfile.mkdtemp(prefix="gpucr-test.", dir="/run"))
        self.dir.chmod(0o755)
        user = self.dir / "user"
        user.mkdir(mode=0o700)
        os.chown(user, uid, uid)
        self.socket = self.dir / "agent.sock"
        self.shepherd = str(user / "shepherd.sock")
        self.listener: socket.socket | None = None
        self.init_pid = self.holder = 0
        self.control: Peer | None = None
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.peers: list[Peer] = []

    def __enter__(self) -> Lab:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_capsule()
        for task in self.tasks:
            if task.poll() is None:
                task.kill()
            task.wait()
            for stream in (task.stdin, task.stdout, task.stderr):
                if stream is not None:
                    stream.close()
        if self.listener:
            self.listener.close()
        for peer in self.peers:
            peer.close()
        if self.control:
            self.control.close()
        shutil.rmtree(self.dir)

    def listen(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.socket))
        self.socket.chmod(0o666)
        self.listener.listen()
        self.listener.settimeout(LIMIT_S)

    def accept(self) -> tuple[Peer, Frame]:
        """A supervisor's connection and its HELLO."""
        assert self.listener
        peer = Peer(self.listener.accept()[0])
        self.peers.append(peer)
        return peer, peer.expect(Type.HELLO)

    def capsule(self, *more: str, mode: str = "start", last_pid: int = 0) -> Frame:
        """Start gpucr-init; returns READY or FAILED."""
        ours, theirs = socket.socketpair()
        hosts = self.dir / "hosts"
        hosts.write_text("127.0.0.1 localhost\n10.9.8.7 capsule-test\n")
        argv = [
            *(str(INIT), "capsule", "--mode", mode, "--uid", str(self.uid), "--gid", str(self.uid)),
            *("--groups", f"{self.uid},4242", "--hostname", "capsule-test", "--run-dir", str(self.dir)),
            *("--hosts", str(hosts), "--control", str(theirs.fileno()), "--last-pid", str(last_pid)),
            *("--private", "/tmp", "--private", "/dev/shm", *more),
        ]
        if "--netns" not in more:
            argv += ["--netns", "-1"]
        starter = subprocess.Popen(argv, pass_fds=self._pass_fds(theirs, more))
        theirs.close()
        self.control = Peer(ours)
        if "--cgroup-wait" in more:
            time.sleep(0.1)
            assert starter.poll() is None
            self.control.send(make(Type.OK))
        assert starter.wait(LIMIT_S) == 0
        ready = self.control.receive()
        self.init_pid, self.holder = ready.int("PID"), ready.int("ROOT")
        return ready

    @staticmethod
    def _pass_fds(theirs: socket.socket, more: tuple[str, ...]) -> list[int]:
        extra = [int(more[i + 1]) for i, m in enumerate(more) if m == "--netns"]
        return [theirs.fileno(), *extra]

    def kill_capsule(self) -> None:
        if self.init_pid:
            try:
                os.kill(self.init_pid, signal.SIGKILL)
            except ProcessLookupError:
                self.init_pid = 0
                return
            wait_until(lambda: not alive(self.init_pid))
            self.init_pid = 0

    def task(
        self,
        *command: str,
        options: tuple[str, ...] = (),
        signal_number: int = 50,
        env: dict[str, str] | None = None,
        stdin: object = subprocess.DEVNULL,
        stdout: object = subprocess.PIPE,
        stderr: object = subprocess.PIPE,
        cwd: str = "/",
        pass_fds: tuple[int, ...] = (),
    ) -> subprocess.Popen[bytes]:
        """Start gpucr-task as the user, as slurmstepd does."""
        argv = [
            *(str(TASK), "--socket", str(self.socket), "--job", "77", "--step", "batch", "--rank", "0"),
            *("--nodes", "1", "--signal", str(signal_number), *options, "--", *command),
        ]
        task = subprocess.Popen(
            argv,
            env={"PATH": "/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", **(env or {})},
            stdin=stdin,  # type: ignore[call-overload]
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            pass_fds=pass_fds,
        )
        self.tasks.append(task)
        return task

    def start(self, *command: str, **how: object) -> tuple[subprocess.Popen[bytes], Peer]:
        """A task that runs in the capsule, and the agent's connection to its supervisor."""
        task = self.task(*command, **how)  # type: ignore[arg-type]
        agent, _hello = self.accept()
        agent.send(make(Type.START, ("ENV", ["GPUCR_CAPSULE=1", "MSG=x=y"]), SOCKET=self.shepherd, TASK="batch.0"))
        return task, agent

    def attach(self, agent: Peer) -> None:
        agent.send(make(Type.ATTACH, SOCKET=self.shepherd, TASK="batch.0"))

    def detach(self) -> Frame:
        shepherd = Peer.to(self.shepherd)
        shepherd.send(make(Type.DETACH))
        frame = shepherd.expect(Type.DETACHED)
        shepherd.close()
        return frame

    def processes(self) -> dict[str, int]:
        """comm -> host pid of every process of the capsule; of several of one name the first, not one that it has
        forked and that has not yet become another."""
        found: dict[str, int] = {}
        ours = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        for entry in sorted((e for e in Path("/proc").iterdir() if e.name.isdigit()), key=lambda e: int(e.name)):
            try:
                if os.readlink(entry / "ns/pid") == ours:
                    found.setdefault((entry / "comm").read_text().strip(), int(entry.name))
            except OSError:
                continue
        return found


def finish(task: subprocess.Popen[bytes], agent: Peer) -> tuple[int, bytes, bytes, Frame]:
    """Answer ENDED; returns exit status, stdout, stderr and the ENDED frame."""
    ended = agent.expect(Type.ENDED)
    agent.send(make(Type.OK))
    out, err = task.communicate(timeout=LIMIT_S)
    return task.returncode, out or b"", err or b"", ended


def finish_reading(task: subprocess.Popen[bytes], agent: Peer) -> tuple[int, bytes, bytes, Frame]:
    """Like finish(), for a task that writes more to stdout than a pipe holds."""
    parts: list[bytes] = []
    stream = task.stdout
    assert stream
    reader = threading.Thread(target=lambda: parts.append(stream.read()))
    reader.start()
    ended = agent.expect(Type.ENDED)
    agent.send(make(Type.OK))
    code = task.wait(LIMIT_S)
    reader.join(LIMIT_S)
    return code, b"".join(parts), b"", ended
