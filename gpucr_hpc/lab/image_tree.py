"""A tree of processes with memory of a known kind, in a capsule, and what saving it took (`scripts/measure_image`)."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucr_hpc import wire
from gpucr_hpc.agent import shepherd
from gpucr_hpc.capsule.capsule import Builder, Capsule, Identity, RestorePids, build, discard
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import EngineConfig, NetworkConfig
from gpucr_hpc.engine import stream
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.proc import clean_env

JOB, UID = "1", 1000
DISK, TMPFS = Path("/bench/disk"), Path("/bench/tmpfs")
NETWORK = NetworkConfig(nat=False)
ENGINE = EngineConfig()
#: More Python packages for the programs.
EXTRA = DISK / "packages"
ONE_THREAD = [f"{name}=1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENMM_CPU_THREADS")]

# Memory of a training process: zero, compressible (words out of a small dictionary, with a count in each page, so that
# no two pages are the same) and random, in turns of 64 MiB. On SIGUSR1 it changes SHARE of its pages; on SIGUSR2 it
# writes a checksum of everything to a file.
PROGRAM = r"""
import mmap, os, random, signal, sys, zlib
kind, size, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mib, page = 1 << 20, 4096
rng = random.Random(7)
words = [rng.randbytes(8) for _ in range(300)]
text = b"".join(rng.choice(words) if rng.random() < 0.85 else rng.randbytes(8) for _ in range(mib // 8)) * 2
noise = open("/dev/urandom", "rb", buffering=0)
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
view = memoryview(memory)
for at in range(0, size, mib):
    end = min(at + mib, size)
    part = (at // (64 * mib)) % 3 if kind == "mixed" else 2
    if part == 0:
        view[at:end] = bytes(end - at)
    elif part == 1:
        for place in range(at, end, page):
            start = rng.randrange(mib)
            view[place : place + page] = text[start : start + page]
            view[place : place + 8] = place.to_bytes(8, "little")
    else:
        noise.readinto(view[at:end])
def check(*_):
    sums = zlib.crc32(view)
    with open(out + ".new", "w") as file:
        file.write(f"{os.getpid()} {sums}")
    os.rename(out + ".new", out)
signal.signal(signal.SIGUSR2, check)
check()
while True:
    signal.pause()
"""


@dataclass
class Run:
    """One way of saving: seconds, bytes."""

    freeze_s: float = 0.0
    durable_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    stored_bytes: int = 0
    restore_s: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)


@contextmanager
def cpu_of(run: Run) -> Iterator[None]:
    """CPU seconds of this process and its ended children meanwhile."""

    def now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    start = now()
    yield
    run.cpu_s += now() - start


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def sync(directory: Path) -> None:
    subprocess.run(["sync", "-f", str(directory)], check=True)


class Tree:
    """A capsule with a program that holds memory, as `command` starts it; without a command, one process."""

    def __init__(self, kind: str, size_bytes: int, command: tuple[str, ...] = ()) -> None:
        self.kind, self.size, self.command = kind, size_bytes, command
        self.run_dir = RunDir.of("/run/gpucr", JOB)
        self.out = Path(f"/bench/work/{kind}.sum")
        self.geometry = Geometry(("n1",), ("n1",), ("127.0.0.1",))
        self.who = Identity(UID, UID, (UID,))
        self.capsule: Capsule | None = None
        self.meta: dict[str, Any] = {}

    async def build(self, pids: RestorePids | None = None) -> Builder:
        self.run_dir.make(UID, UID)
        builder = await build(
            JOB,
            self.run_dir,
            self.who,
            geometry=self.geometry,
            node_rank=0,
            config=NETWORK,
            pids=pids,
        )
        self.capsule = builder.capsule
        return builder

    async def start(self) -> None:
        self.out.unlink(missing_ok=True)
        await self.build()
        with socket.socket(socket.AF_UNIX) as sock, open(os.devnull, "r+b") as null:
            sock.connect(self.run_dir.shepherd_socket)
            frame = wire.make(
                wire.Type.SPAWN,
                ("ARG", [*self.command, "/usr/bin/python3", "/bench/program.py", *self._arguments()]),
                ("ENV", ["PATH=/usr/bin:/bin", "HOME=/tmp", f"PYTHONPATH={EXTRA}", *ONE_THREAD]),
                ("RLIMIT", []),
                **{"TASK": "batch.0", "RANK": 0, "CWD": "/bench/work", "UMASK": 0o22, "NICE": 0, "AFFINITY": ""},
            )
            socket.send_fds(sock, [wire.encode(frame)], [null.fileno()] * 3)
            self._expect(sock, wire.Type.SPAWNED)
            sock.sendall(wire.encode(wire.make(wire.Type.GO, TASK="batch.0")))
            wait_until(self.out.exists, 300, "the process's checksum")
        await shepherd.detach(JOB, "n1", self.run_dir.shepherd_socket)

    def _arguments(self) -> list[str]:
        return [self.kind, str(self.size), str(self.out)]

    @staticmethod
    def _expect(sock: socket.socket, kind: wire.Type) -> None:
        head = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        found, length = wire.parse_header(head)
        frame = wire.parse_payload(found, sock.recv(length, socket.MSG_WAITALL))
        if frame.type is not kind:
            raise SystemExit(f"measure_image: the shepherd answered {frame}")

    def checksum(self) -> str:
        """What the process says about its memory now."""
        before = self.out.read_text()
        self.out.unlink()
        assert self.capsule is not None
        (process,) = [p for p in namespace_processes(self.capsule.init_pid) if p.name == "python3"]
        os.kill(process.pid, signal.SIGUSR2)
        wait_until(self.out.exists, 300, "the process's checksum")
        return f"{before} {self.out.read_text()}"

    async def end(self) -> None:
        await discard(JOB, self.run_dir, self.capsule)


def prepare() -> None:
    """A place for the programs, what the agent makes ready on a node, and CRIU's cache of what the kernel can do."""
    stream.raise_pipe_limit(ENGINE.pipe_limit_bytes)
    Path("/bench/work").mkdir(exist_ok=True)
    os.chown("/bench/work", UID, UID)
    subprocess.run(["criu", "check", "--no-default-config"], check=True, capture_output=True, env=clean_env())
