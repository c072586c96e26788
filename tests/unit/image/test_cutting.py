"""Cuts by content."""

from __future__ import annotations

import random

from gpucr_hpc.image.chunkid import ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.cutting import MIN_PAGES, PAGE_BYTES, cuts
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore

ID = "20261127T232501Z-3f9a"
KEY = DataKey(b"k" * 32, b"i" * 32)


def test_cuts_are_apart_and_at_pages():
    """No chunk is short, no cut is at the beginning or inside a page, and noise is cut often."""
    total = 0
    for seed in range(32):
        found = cuts(memoryview(random.Random(seed).randbytes(CHUNK_BYTES)), CHUNK_BYTES - 100)
        total += len(found)
        for before, at in zip([0, *found], found, strict=False):
            assert at - before >= MIN_PAGES * PAGE_BYTES
            assert not at % PAGE_BYTES
    assert 32 <= total <= 32 * 4  # 256 pages, one in 97 and those that come too early left out
    assert [] == cuts(memoryview(bytes(CHUNK_BYTES)), CHUNK_BYTES)
    assert [] == cuts(memoryview(b"x" * PAGE_BYTES), 5)
    assert [] == cuts(memoryview(b"x" * PAGE_BYTES), 0)


def test_zero_memory_is_parted_from_other():
    """A run of zeros between noise is a chunk of its own, so that it costs nothing."""
    rng = random.Random(4)
    data = rng.randbytes(200 * PAGE_BYTES) + bytes(56 * PAGE_BYTES)
    assert 200 * PAGE_BYTES in cuts(memoryview(data), len(data))


def ids(data: bytes) -> tuple[set[bytes], int]:
    """Ids of the chunks of a stream of pages, and their number; the stream reads back."""
    store = MemoryStore()
    staging = store.begin("41", ID)
    writer = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY)
    with writer.stream("pages-1.img", pages=True) as stream:
        for at in range(0, len(data), 300_000):
            stream.write(data[at : at + 300_000])
    with ImageReader(staging.open, writer.finish(), checkpoint=ID, key=KEY) as reader:
        assert data == reader.read("pages-1.img")
        found = reader.index.streams["pages-1.img"]
        return {found.chunk(n).id for n in range(len(found))}, len(found)


def test_pages_put_in_front_change_little():
    """A page more at the beginning, in the middle, or some fewer: nearly all chunks are found again."""
    rng = random.Random(3)
    data = b"".join(rng.randbytes(4 << 20) if n % 3 else bytes(1 << 20) for n in range(7))
    before, number = ids(data)
    middle = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
    for after in (
        rng.randbytes(PAGE_BYTES) + data,
        data[: middle] + rng.randbytes(3 * PAGE_BYTES) + data[middle:],
        data[5 * PAGE_BYTES :],
    ):
        again, total = ids(after)
        assert len(again - before) <= 5
        assert abs(total - number) <= 5


def test_the_same_bytes_however_they_arrive():
    """Cuts depend on the bytes alone: the same pages at another time give the same chunks."""
    data = random.Random(8).randbytes(5 << 20)
    assert ids(data) == ids(data)
    assert ChunkIds(b"i" * 32).of(b"") not in ids(data)[0]


def test_a_stream_may_end_at_a_cut():
    """The last page is one that ends a chunk: nothing follows it, not even an empty chunk."""
    pages = (bytes([number]) * PAGE_BYTES for number in range(256))
    page = next(page for page in pages if cuts(memoryview(page * MIN_PAGES), MIN_PAGES * PAGE_BYTES))
    for number in (MIN_PAGES, 2 * MIN_PAGES, 256 + MIN_PAGES):
        assert number // MIN_PAGES == ids(page * number)[1]
