"""Cuts by content."""

from __future__ import annotations

import random
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr_hpc.image.chunkid import ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.cutting import MAX_PAGES, MEAN_PAGES, MIN_PAGES, PAGE_BYTES, cuts, marks
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore

ID = "20261127T232501Z-3f9a"
KEY = DataKey(b"k" * 32, b"i" * 32)


def slowly(data: bytes) -> list[int]:
    """The rule, page by page: a cut where a page says so or zero memory begins or ends, not before MIN_PAGES and not
    after MAX_PAGES."""
    found, last, was_zero = [], 0, None
    for page in range(len(data) // PAGE_BYTES):
        first, middle = struct.unpack_from("<Q2040xQ", data, page * PAGE_BYTES)
        is_zero = first + middle == 0
        if page - last == MAX_PAGES or (page - last >= MIN_PAGES and is_zero != was_zero):
            found.append(page)
            last = page
        if page + 1 - last >= MIN_PAGES and (first + middle) % MEAN_PAGES == 1:
            found.append(page + 1)
            last = page + 1
        was_zero = is_zero
    if len(data) // PAGE_BYTES - last == MAX_PAGES:
        found.append(last + MAX_PAGES)
    return found


def memory(seed: int, pages: int, zeros: float) -> bytes:
    """Runs of zero and of other pages, of which more than usual end a chunk."""
    rng, data = random.Random(seed), bytearray()
    while len(data) < pages * PAGE_BYTES:
        run = rng.choice([1, 3, 40, 300]) * PAGE_BYTES
        data += (
            bytes(run)
            if rng.random() < zeros
            else b"".join(
                rng.randrange(1, rng.choice([9, 1 << 60])).to_bytes(8, "little") * 512 for _ in range(run // PAGE_BYTES)
            )
        )
    return bytes(data[: pages * PAGE_BYTES])


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(0, 1500), st.floats(0, 1), st.lists(st.integers(1, 400), max_size=9))
def test_cuts_are_those_of_the_rule_in_however_many_parts(seed, pages, zeros, parts):
    """Where a part of the memory ends has no influence on where it is cut."""
    data = memory(seed, pages, zeros)
    whole = marks(memoryview(data))
    assert slowly(data) == cuts(whole)
    found, at, since, before = [], 0, 0, 1
    for count in [*parts, pages]:
        part = whole[at : at + count]
        for page in cuts(part, since, before):
            if not found or found[-1] != at + page:
                found.append(at + page)
        at += len(part)
        since, before = at - (found[-1] if found else 0), part[-1] if part else before
    assert slowly(data) == found


def test_cuts_are_apart_and_at_pages():
    """Noise is cut often, what has no page that says so at the largest size, and an unfinished page never."""
    total = 0
    for seed in range(32):
        found = cuts(marks(memoryview(random.Random(seed).randbytes(CHUNK_BYTES - 100))))
        total += len(found)
        for before, at in zip([0, *found], found, strict=False):
            assert at - before >= MIN_PAGES
    assert 32 <= total <= 32 * 4  # 256 pages, one in 97 and those that come too early left out
    assert [MAX_PAGES, 2 * MAX_PAGES] == cuts(marks(memoryview(bytes(2 * CHUNK_BYTES + PAGE_BYTES))))
    assert [] == marks(memoryview(b"x" * (PAGE_BYTES - 1)))
    assert [] == cuts([])


def test_zero_memory_is_parted_from_other():
    """A run of zeros between noise is a chunk of its own, so that it costs nothing."""
    data = random.Random(4).randbytes(200 * PAGE_BYTES) + bytes(56 * PAGE_BYTES)
    assert 200 in cuts(marks(memoryview(data)))


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
        data[:middle] + rng.randbytes(3 * PAGE_BYTES) + data[middle:],
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
    page = next(page for page in pages if cuts(marks(memoryview(page * MIN_PAGES))))
    for number in (MIN_PAGES, 2 * MIN_PAGES, 256 + MIN_PAGES):
        assert number // MIN_PAGES == ids(page * number)[1]
