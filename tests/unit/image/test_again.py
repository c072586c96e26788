"""Memory that was sealed before: what has not changed is not read again, and the image is that of a reading of all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_pair import ID, KEY

from gpucr_hpc.engine import sealed
from gpucr_hpc.engine.sealed import SealedMemory, split
from gpucr_hpc.errors import MemoryUnreadable
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.extents import Extent
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.model import ImageEntry
from gpucr_hpc.store.memory import MemoryStaging, MemoryStore

PAGE, AT, PID = 4096, 1 << 40, 7
LIMIT_S = 20.0


class Process:
    """Memory from AT on, and how much of it was read and marked. At `broken` it cannot be read."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.read_bytes = self.marked_bytes = 0
        self.broken: int | None = None

    def of(self, address: int, size: int) -> bytearray:
        if self.broken is not None and address <= self.broken < address + size:
            raise MemoryUnreadable(reason=f"Bad address at {self.broken:#x}")
        assert AT <= address <= address + size <= AT + len(self.content)
        return self.content[address - AT : address - AT + size]

    def read(self, ranges: Sequence[tuple[int, int]], room: memoryview) -> None:
        data = b"".join(self.of(*place) for place in ranges)
        room[:] = data
        self.read_bytes += len(data)

    def marks(self, key: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        ids = KEY.chunk_ids()
        assert ids is not None
        assert key == ids.mark_key
        self.marked_bytes += sum(size for _, size in ranges)
        found = []
        for place in ranges:
            data = self.of(*place)
            found.append(ids._hash.encrypt(bytes(12), b"", bytes(data)) if any(data) else bytes(16))
        return found


class Trial:
    """An image of a process of which `ranges` (begin and end, in pages) are sealed first."""

    def __init__(self, content: bytes, ranges: Sequence[tuple[int, int]], streams: int = 1) -> None:
        self.process = Process(content)
        self.staging: MemoryStaging = MemoryStore().begin("41", ID)
        self.image = ImageWriter(self.staging.create, checkpoint=ID, node_rank=0, key=KEY, workers=3)
        self.sealed = SealedMemory()
        for number in range(streams):
            some = [(AT + begin * PAGE, AT + end * PAGE) for begin, end in ranges[number::streams]]
            if not some:
                continue
            with self.image.stream(self.sealed.name(), pages=True, early=True) as stream:
                stream.copy_extents(Extent(self.process.read, begin, end - begin) for begin, end in some)
            self.sealed.add(PID, some, stream)
            total = sum(end - begin for begin, end in some)
            wait_until(lambda s=stream, t=total: size_of(s.sealed()) == t, LIMIT_S, "the store")
        self.process.read_bytes = 0

    def frozen(self, runs: Sequence[tuple[int, int]]) -> tuple[ImageEntry, bytes]:
        """The image, and what it has of runs (begin and end, in pages)."""
        process, chunks = self.process, self.sealed.chunks(PID)
        extents = [
            extent
            for begin, end in runs
            for extent in split(AT + begin * PAGE, (end - begin) * PAGE, chunks, process.read, process.marks)
        ]
        with self.image.stream("pages-1.img", pages=True) as stream:
            total = stream.copy_extents(extents)
        entry = self.image.finish()
        with ImageReader(self.staging.open, entry, checkpoint=ID, key=KEY) as reader:
            reader.verify(deep=True)
            found = reader.read("pages-1.img")
        assert total == len(found) == reader.size("pages-1.img")
        return entry, found


def size_of(records: bytes) -> int:
    return sum(int.from_bytes(records[at + 12 : at + 16], "little") for at in range(0, len(records), 52))


def content(pages: int, seed: int = 1) -> bytes:
    """Random pages, some runs of them zero."""
    rng = random.Random(seed)
    data = bytearray(rng.randbytes(pages * PAGE))
    for _ in range(3):
        at, length = rng.randrange(pages), rng.randrange(1, 400)
        data[at * PAGE : (at + length) * PAGE] = bytes(len(data[at * PAGE : (at + length) * PAGE]))
    return bytes(data)


def test_what_has_not_changed_is_only_marked():
    pages = 20_000
    data = content(pages)
    trial = Trial(data, [(0, pages)])
    entry, found = trial.frozen([(0, pages)])
    assert found == data
    assert (trial.process.read_bytes, trial.process.marked_bytes) == (0, len(data))
    assert entry.streams == 1, "nothing is left of the early stream"


def test_what_has_changed_is_read_and_is_in_the_image_as_it_is_now():
    pages = 20_000
    trial = Trial(content(pages), [(0, pages)])
    rng = random.Random(2)
    for length in (1, 1, 1, 100, 1000):  # among them what was zero, and what is zero now
        at = rng.randrange(pages - length)
        trial.process.content[at * PAGE : (at + length) * PAGE] = rng.randbytes(length * PAGE)
    trial.process.content[5000 * PAGE : 5700 * PAGE] = bytes(700 * PAGE)
    entry, found = trial.frozen([(0, pages)])
    assert found == trial.process.content
    assert 0 < trial.process.read_bytes <= (5 * 3 + 1000 + 700) * CHUNK_BYTES // 4
    assert entry.bytes_plain > len(found), "what it was stays in the early stream"


def test_one_bit_is_enough():
    trial = Trial(content(3000), [(0, 3000)])
    trial.process.content[1234 * PAGE + 5] ^= 1
    _, found = trial.frozen([(0, 3000)])
    assert found == trial.process.content
    assert trial.process.read_bytes <= CHUNK_BYTES


RANGES = st.lists(st.integers(0, 8000), min_size=2, max_size=10, unique=True).map(sorted)


@settings(max_examples=30, deadline=None)
@given(RANGES, RANGES, st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 1 << 20]))
def test_any_part_of_memory_may_have_been_sealed_and_any_may_be_wanted(early, runs, seed, streams, least):
    """Other ranges than those that were sealed, with gaps, and some of the memory has changed."""
    ranges = list(zip(early[::2], early[1::2], strict=False))
    wanted = list(zip(runs[::2], runs[1::2], strict=False))
    kept, sealed.LEAST_BYTES = sealed.LEAST_BYTES, least
    try:
        trial = Trial(content(8000, seed), ranges, streams)
        rng = random.Random(seed)
        for _ in range(4):
            at = rng.randrange(8000)
            trial.process.content[at * PAGE : (at + 1) * PAGE] = os.urandom(PAGE)
        _, found = trial.frozen(wanted)
    finally:
        sealed.LEAST_BYTES = kept
    assert found == b"".join(trial.process.content[begin * PAGE : end * PAGE] for begin, end in wanted)


@pytest.mark.parametrize("page", [100, 2500])
def test_what_cannot_be_marked_fails_the_image(page):
    trial = Trial(content(3000), [(0, 3000)])
    trial.process.broken = AT + page * PAGE
    with pytest.raises(MemoryUnreadable, match="Bad address"):
        trial.frozen([(0, 3000)])
    trial.image.abort()


def test_what_is_not_in_the_store_yet_is_read():
    """The records of a stream end before the first chunk that is on its way."""
    trial = Trial(content(3000), [(0, 3000)])
    (_, _, stream) = trial.sealed._waiting[0]
    with stream._lock:
        stream.records[3 * 52 : 4 * 52], stream._sealed_bytes = bytes(52), 0
    assert len(trial.sealed.chunks(PID)) == 3
