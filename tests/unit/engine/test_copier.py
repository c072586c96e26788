"""gpucr-copier, built with sanitizers, and its two ends: memory of a process of another parent."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpucr_hpc.engine import copier
from gpucr_hpc.engine.copier import Copier
from gpucr_hpc.errors import MemoryUnreadable
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.lab.wait import wait_until

_SOURCE = Path(__file__).resolve().parents[3] / "spank_plugin"
SIZE = 8 << 20
NSPID = 7
LIMIT_S = 20
# Its memory: known content, and a page behind it that is not there. Whoever may trace it is any (Yama).
_PROGRAM = f"""
import ctypes, mmap, random, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
memory = mmap.mmap(-1, {SIZE} + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:{SIZE}] = random.Random(5).randbytes({SIZE})
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CDLL(None).munmap(ctypes.c_void_p(at + {SIZE}), ctypes.c_size_t(4096))
print(at, flush=True)
sys.stdin.read()
"""
CONTENT = random.Random(5).randbytes(SIZE)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc") or not shutil.which("make"):
        pytest.skip("gcc and make are needed")
    folder = tmp_path_factory.mktemp("copier")
    target = folder / "asan/gpucr-copier"
    subprocess.run(["make", "-s", "-C", str(_SOURCE), f"B={folder}", str(target)], check=True)
    return target


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and where its memory begins."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield child, int(child.stdout.readline())
        child.kill()


class Worker:
    """The far end of the agent's order, in this process."""

    copier: Copier

    async def call(self, verb: str, fds: Sequence[int] = (), *, pids: list[int]) -> None:
        assert verb == "copier"
        self.copier = Copier(fds[0], fds[1:], pids)


@asynccontextmanager
async def copying(program: Path, pid: int, *, write: bool = False, processors: Any = ()) -> AsyncIterator[Copier]:
    worker = Worker()
    kept, copier.PROGRAM = copier.PROGRAM, program
    try:
        async with copier.started(worker, {NSPID: pid}, write=write, processors=processors):  # type: ignore[arg-type]
            yield worker.copier
            worker.copier.close()
    finally:
        copier.PROGRAM = kept


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def ranges_of(seed: int, address: int) -> tuple[list[tuple[int, int]], bytes]:
    """Ranges in any order and of any size, also ones longer than a piece and more than a message takes; their bytes."""
    rng = random.Random(seed)
    places = [(rng.randrange(SIZE - 5000), rng.randrange(1, 5000)) for _ in range(1500)]
    places.insert(rng.randrange(len(places)), (3, 3 << 20))
    return [(address + at, size) for at, size in places], b"".join(CONTENT[at : at + size] for at, size in places)


def test_many_threads_read_what_is_there(program, process):
    child, address = process
    found: dict[int, bool] = {}

    async def work() -> None:
        async with copying(program, child.pid, processors=sorted(os.sched_getaffinity(0))) as through:
            read = through.memory(NSPID)

            def one(seed: int) -> None:
                ranges, wanted = ranges_of(seed, address)
                room = bytearray(len(wanted))
                read(ranges, memoryview(room))
                found[seed] = bytes(room) == wanted

            threads = [threading.Thread(target=one, args=(seed,)) for seed in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)

    run(work)
    assert found == dict.fromkeys(range(12), True)


def test_writes_land_where_they_should_and_nowhere_else(program, process):
    child, address = process

    async def work() -> None:
        async with copying(program, child.pid, write=True) as through:
            with through.lane() as lane:
                lane.buffer.view[:] = bytes(range(256)) * (len(lane.buffer.view) // 256)
                spans = [(number * 100, address + number * 4096, 50) for number in range(1200)]
                assert lane.move(NSPID, spans) == (0, 0)
            wanted = bytearray(CONTENT)
            for at, place, size in spans:
                wanted[place - address : place - address + size] = lane.buffer.view[at : at + size]
            with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
                assert os.pread(memory.fileno(), SIZE, address) == wanted

    run(work)


def test_what_cannot_be_moved_is_named(program, process):
    """With the address: the rest of the request has been done, and the program goes on."""
    child, address = process

    async def work() -> None:
        async with copying(program, child.pid) as through, through_lane(through) as lane:
            gone = address + SIZE
            assert lane.move(NSPID, [(0, address, 100), (100, gone, 10)]) == (errno.EFAULT, gone)
            assert lane.buffer.view[:100] == CONTENT[:100]
            # The kernel gives whole pages up to the one that is missing.
            assert lane.move(NSPID, [(0, gone - 50, 100)]) == (errno.EFAULT, gone)
            assert lane.move(NSPID + 1, [(0, address, 1)])[0] == errno.ESRCH
            with pytest.raises(MemoryUnreadable, match=f"Bad address at {gone:#x}"):
                through.memory(NSPID)([(gone, 1)], memoryview(bytearray(1)))
            assert lane.move(NSPID, [(7, address + 5, 100)]) == (0, 0)
            assert lane.buffer.view[7:107] == CONTENT[5:105]

    run(work)


@asynccontextmanager
async def through_lane(through: Copier) -> AsyncIterator[copier.Lane]:
    with through.lane() as lane:
        yield lane


def test_chunks_are_marked_where_they_are(program, process):
    """More than a message takes, some of them zero; nothing of them comes into the window."""
    child, address = process
    key, nothing = os.urandom(32), CONTENT.index(0)
    ranges, data = ranges_of(3, address)
    chunks = [(place, min(size, CHUNK_BYTES)) for place, size in [*ranges, (address + nothing, 1)]]
    mark = AESGCM(key).encrypt
    wanted = [mark(bytes(12), b"", CONTENT[place - address : place - address + size]) for place, size in chunks]
    wanted[-1] = bytes(16)

    async def work() -> None:
        async with copying(program, child.pid) as through:
            assert through.marks(NSPID)(key, chunks) == wanted
            assert not any(through.window[:])
            assert through.marks(NSPID)(key, []) == []

    run(work)
    assert len(data) > len(chunks) > 1024


def test_what_cannot_be_marked_is_named(program, process):
    child, address = process
    key, gone = os.urandom(32), address + SIZE

    async def work() -> None:
        async with copying(program, child.pid) as through:
            mark = through.marks(NSPID)
            with pytest.raises(MemoryUnreadable, match=f"Bad address at {gone:#x}"):
                mark(key, [(address, 5), (gone - 50, 100), (address, 6)])
            with pytest.raises(MemoryUnreadable, match="Invalid argument"):
                mark(key, [(address, CHUNK_BYTES + 1)])
            with pytest.raises(MemoryUnreadable, match="No such process"):
                through.marks(NSPID + 1)(key, [(address, 5)])
            assert len(mark(key, [(address, 5)])) == 1
        async with copying(program, child.pid, write=True) as through:
            with pytest.raises(MemoryUnreadable, match="Invalid argument"):
                through.marks(NSPID)(key, [(address, 5)])

    run(work)


@pytest.mark.parametrize(
    "span",
    [
        lambda window: (0, window + 1),
        lambda window: (window, 1),
        lambda _: ((1 << 64) - 1, 2),
        lambda _: (1, (1 << 64) - 1),
        lambda _: (0, 0),
    ],
)
def test_nothing_outside_the_window_is_touched(program, process, span):
    child, address = process

    async def work() -> None:
        async with copying(program, child.pid) as through, through_lane(through) as lane:
            at, size = span(len(through.window))
            assert lane.move_at(NSPID, [(at, address, size)])[0] == errno.EINVAL
            lane._sock.send(b"short")
            assert copier._ANSWER.unpack(lane._sock.recv(16))[0] == errno.EINVAL
            assert lane.move(NSPID, [(0, address, 10)]) == (0, 0)

    run(work)


def test_a_process_that_has_ended_is_nobody(program, process):
    """Also as long as nobody has asked for its end."""
    child, address = process

    async def work() -> None:
        async with copying(program, child.pid) as through, through_lane(through) as lane:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert lane.move(NSPID, [(0, address, 10)])[0] == errno.ESRCH

    run(work)


def test_a_program_that_is_gone_keeps_nobody(program, process):
    child, address = process

    async def work() -> None:
        async with copying(program, child.pid) as through, through_lane(through) as lane:
            assert lane.move(NSPID, [(0, address, 10)]) == (0, 0)
            for pid in programs():
                os.kill(pid, signal.SIGKILL)
            assert lane.move(NSPID, [(0, address, 10)])[0] == errno.EPIPE
            with pytest.raises(MemoryUnreadable, match=f"Broken pipe at {address:#x}"):
                through.memory(NSPID)([(address, 10)], memoryview(bytearray(10)))

    run(work)


def programs() -> list[int]:
    """Of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"gpucr-copier" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_it_has_one_right_and_ends_with_its_user(program, process):
    child, _ = process

    async def work() -> None:
        async with copying(program, child.pid) as through:
            with through.lane() as lane:  # it serves when its rights are gone
                lane.move(NSPID, [(0, 0, 1)])
            (pid,) = programs()
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
            assert fields["NoNewPrivs"] == "1"
            assert os.geteuid() or set(fields["Uid"].split() + fields["Gid"].split()) == {"65534"}
            assert int(fields["CapPrm"], 16) & ~(1 << 19) == 0
            assert int(fields["CapEff"], 16) & ~(1 << 19) == 0
            through.close()
            await asyncio.to_thread(wait_until, lambda: pid not in programs(), LIMIT_S, "its end")

    run(work)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["read"],
        ["look", "0", "4096", "-", "0", "1:1:1"],
        ["read", "0", "4096", "-", "x", "1:1:1"],
        ["read", "0", "4096", "-", "0", "1:1"],
    ],
)
def test_bad_arguments_are_said(program, arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert done.stderr.startswith("gpucr: copier: bad")


def test_its_version_is_what_the_agent_wants(program):
    said = subprocess.run([program, "--version"], capture_output=True, check=True).stdout
    assert said == copier.READY


def test_without_the_program_nothing_is_started(process):
    child, _ = process

    async def work() -> None:
        worker = Worker()
        kept, copier.PROGRAM = copier.PROGRAM, Path("/nonexistent")
        try:
            async with copier.started(worker, {NSPID: child.pid}, write=False):  # type: ignore[arg-type]
                assert not hasattr(worker, "copier")
        finally:
            copier.PROGRAM = kept

    run(work)


@pytest.mark.parametrize(
    "content", [b"\x7fELF of another kind", b"#!/bin/sh\necho gpucr-copier 1\nread", b"#!/bin/sh\nexit 127"]
)
def test_a_program_that_cannot_be_started_or_is_another_is_not_used(process, tmp_path, content):
    """Memory goes the other way then."""
    child, _ = process
    program = tmp_path / "gpucr-copier"
    program.write_bytes(content)
    program.chmod(0o755)

    async def work() -> None:
        worker = Worker()
        kept, copier.PROGRAM = copier.PROGRAM, program
        try:
            async with copier.started(worker, {NSPID: child.pid}, write=False) as moved:  # type: ignore[arg-type]
                assert not hasattr(worker, "copier")
                assert moved() == 0
        finally:
            copier.PROGRAM = kept

    run(work)


def test_what_has_been_moved_is_counted(program, process):
    """For who shows how far a dump is: the kernel counts it for nobody."""
    child, address = process

    async def work() -> None:
        worker = Worker()
        kept, copier.PROGRAM = copier.PROGRAM, program
        try:
            async with copier.started(worker, {NSPID: child.pid}, write=False) as moved:  # type: ignore[arg-type]
                assert moved() == 0
                for _ in range(20):
                    worker.copier.memory(NSPID)([(address, 1000)], memoryview(bytearray(1000)))
                assert moved() == 20_000
                worker.copier.close()
        finally:
            copier.PROGRAM = kept

    run(work)
