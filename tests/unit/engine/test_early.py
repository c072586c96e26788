"""What memory of a process is ready to be sealed while it still gets more."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.engine import early, large

MIB = 1 << 20

# On each line of its input it fills so many MiB more of a mapping that it makes at the second line.
_PROGRAM = """
import mmap, sys
old = mmap.mmap(-1, 80 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
old[:] = b"o" * len(old)
at, new = 0, None
sys.stdin.readline()
print("ready", flush=True)
for line in sys.stdin:
    if new is None:
        new = mmap.mmap(-1, 900 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(int(line)):
        new[at : at + (1 << 20)] = b"n" * (1 << 20)
        at += 1 << 20
    new[at : at + (100 << 20)] = bytes(100 << 20)  # as the driver's is before it is filled
    print(at, flush=True)
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.kill()


def tell(child: subprocess.Popen[str], line: object) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def size(ranges: list[early.Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def test_new_memory_is_named_once_and_at_the_second_look(program):
    if not large.kernel_names_pages():
        pytest.skip("the kernel has no PAGEMAP_SCAN")
    assert tell(program, "begin") == "ready"
    growing = early.Growing(1, program.pid)
    assert growing.settled() == []
    tell(program, 600)
    assert growing.settled() == [], "it may still be written to"
    first = growing.settled()
    assert size(first) == early._MOST_BYTES
    second = growing.settled()
    assert 600 * MIB - size(first) - size(second) < early._LEAST_BYTES
    assert early.minus(first, second) == first
    assert growing.settled() == [], "nothing is named twice, nor what was there before, nor what is zero"
    tell(program, 30)
    growing.settled()
    more = growing.settled()
    assert abs(size(more) - 30 * MIB) < early._LEAST_BYTES
    assert early.minus(more, [*first, *second]) == more
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert growing.settled() == []
    program.wait()
    assert growing.settled() == []


@pytest.mark.parametrize("most", [8, 16, 64])
def test_pieces_that_lie_alone_keep_nothing_away(monkeypatch, tmp_path, most: int):
    """However many there are: they are looked at again and again, and never taken."""
    monkeypatch.setattr(early, "_MOST_BYTES", most * MIB)
    monkeypatch.setattr(early.Growing, "_mappings", lambda _: [])
    piece, content = early._PIECE_BYTES, [1, 0] * 40 + [1, 1, 1, 0] + [1] * 12 + [0] + [1] * 7
    path = tmp_path / "memory"
    with path.open("w+b") as memory:
        for number, filled in enumerate(content, 1):
            os.pwrite(memory.fileno(), b"x" if filled else b"\0", number * piece - 1)
        growing, taken = early.Growing(1, 1), []
        while found := growing._with_content(memory.fileno(), early.minus([(0, len(content) * piece)], taken)):
            assert all(end - begin >= early._LEAST_BYTES for begin, end in found)
            assert size(found) < most * MIB + early._LEAST_BYTES
            assert early.minus(found, taken) == found
            taken = early.joined([*taken, *found])
    whole = [(84 * piece, 96 * piece), (97 * piece, 104 * piece)]
    assert early.minus(taken, whole) == []
    assert size(early.minus(whole, taken)) < 2 * early._LEAST_BYTES


def test_mappings_are_those_that_can_be_read_beside():
    lines = [
        "1000-3000 rw-p 00000000 00:00 0 ",
        "3000-5000 rw-p 00000000 00:00 0 [heap]",
        "6000-7000 rw-p 00000000 00:00 0 [anon:x]",
        "8000-9000 r--p 00000000 00:00 0 ",
        "9000-a000 rw-s 00000000 00:00 0 ",
        "a000-b000 rw-p 00000000 08:01 77 /lib/x",
        "b000-c000 rw-p 00000000 00:00 0 [stack]",
        "c000-d000 ---p 00000000 00:00 0 ",
    ]
    assert large.anonymous_mappings(lines) == [(0x1000, 0x5000), (0x6000, 0x7000)]


_RANGES = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: list(zip(*[iter(sorted(ends)[: len(ends) // 2 * 2])] * 2, strict=True))
)


def points(ranges: list[early.Range]) -> set[int]:
    return {point for begin, end in ranges for point in range(begin, end)}


@given(_RANGES, _RANGES)
def test_ranges_are_sets(some, others):
    less, both = early.minus(some, others), early.joined([*early.minus(some, others), *others])
    assert points(less) == points(some) - points(others)
    assert points(both) == points(some) | points(others)
    for found in (less, both):
        assert found == sorted(found)
        assert all(begin < end for begin, end in found)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(both))


class Store:
    """A worker whose store does not answer, or answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def call(self, verb: str, **_: object) -> None:
        assert verb == "early"
        self.asked.set()
        await self.answers.wait()


class Always:
    """Memory that is ready all the time."""

    def __init__(self, nspid: int, _: int) -> None:
        self.nspid = nspid

    def settled(self) -> list[early.Range]:
        return [(0, 8 * MIB)]


def test_a_driver_that_fails_does_not_wait_for_the_store(monkeypatch):
    """The checkpoint is undone then, and the job runs on, although the worker is still at it."""
    monkeypatch.setattr(early, "Growing", Always)

    async def work() -> None:
        store = Store()
        async with early.sealing(store, {1: 1, 2: 2}):  # type: ignore[arg-type]
            await store.asked.wait()
            raise RuntimeError("the driver")

    with pytest.raises(RuntimeError, match="the driver"):
        asyncio.run(asyncio.wait_for(work(), 20))


def test_what_is_being_sealed_when_the_driver_is_done_is_waited_for(monkeypatch):
    """Nothing is read any more when the tree is frozen."""
    monkeypatch.setattr(early, "Growing", Always)

    async def work() -> list[str]:
        store, order = Store(), []

        async def answer() -> None:
            await store.asked.wait()
            order.append("read")
            store.answers.set()

        answering = asyncio.ensure_future(answer())
        async with early.sealing(store, {1: 1}):  # type: ignore[arg-type]
            await store.asked.wait()
        order.append("frozen")
        await answering
        return order

    assert asyncio.run(asyncio.wait_for(work(), 20)) == ["read", "frozen"]


def test_a_job_without_gpus_asks_nothing():
    async def work() -> None:
        async with early.sealing(Store(), {}):  # type: ignore[arg-type]
            pass

    asyncio.run(work())
