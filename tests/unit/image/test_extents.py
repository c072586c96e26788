"""Memory that lies in places of its own: read by several threads, the image that of one pipe."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_relay import begun, chunks, memory, written

from gpucr_hpc.errors import MemoryUnreadable
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.cutting import PAGE_BYTES
from gpucr_hpc.image.extents import Extent, Extents, parts

GAP = 7 * PAGE_BYTES
LENGTHS = st.lists(st.sampled_from([1, 3, 97, 256, 257, 700]), max_size=9)


@contextmanager
def scattered(data: bytes, lengths: list[int]) -> Iterator[list[Extent]]:
    """Two files with runs of pages in turns, the second file's from its end on; in the order of the data."""
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        extents, at = [], 0
        for turn, length in enumerate([*lengths, len(data) // PAGE_BYTES + 1]):
            run = data[at : at + length * PAGE_BYTES]
            file = (one, other)[turn % 2]
            place = GAP + at if turn % 2 == 0 else 2 * len(data) - at - len(run)
            os.pwrite(file.fileno(), run, place)
            if run:
                extents.append(Extent(file.fileno(), place, len(run)))
            at += len(run)
        yield extents


def read(extents: list[Extent], **values: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    staging, image = begun(**values)
    with image.stream("pages-1.img", pages=True) as stream:
        assert sum(extent.size for extent in extents) == stream.copy_extents(extents)
    return chunks(staging, image.finish(), "pages-1.img")


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 1300), st.integers(0, 1 << 16))
def test_image_is_that_of_one_pipe(lengths, pages, seed):
    """Bytes, order, ends and ids of chunks: whatever the places, sizes and turns of the runs."""
    data = memory(seed, pages * PAGE_BYTES)
    with scattered(data, lengths) as extents:
        back, found = read(extents)
    assert data == back
    assert written(data) == found


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 3 << 20)), max_size=20), st.sampled_from([1, 4]))
def test_parts_are_whole_but_for_the_last(places, chunks):
    """Every byte once, in its order; all parts but the last one have the size that is asked for."""
    extents = [Extent(3, position, size) for position, size in places]
    cut = list(parts(extents, chunks * CHUNK_BYTES))
    assert all(size == chunks * CHUNK_BYTES for size, _, _ in cut[:-1])
    assert all(size == sum(extent.size for extent in source._extents) for size, source, _ in cut)
    assert [last for _, _, last in cut] == [False] * (len(cut) - 1) + [True]
    at, flat = 0, [extent for _, source, _ in cut for extent in source._extents]
    for extent in filter(lambda extent: extent.size, extents):
        left, place = extent.size, extent.position
        while left:
            assert (flat[at].source, flat[at].position) == (3, place)
            place, left, at = place + flat[at].size, left - flat[at].size, at + 1
    assert at == len(flat)


def test_all_is_read_when_the_stream_is_closed():
    """A job that goes on may change its memory then."""
    data = memory(5, 9 * CHUNK_BYTES + 3 * PAGE_BYTES)
    staging, image = begun(room_bytes=32 << 20, expected_bytes=len(data))
    with scattered(data, [300, 500]) as extents:
        with image.stream("pages-1.img", pages=True) as stream:
            stream.copy_extents(extents)
        for fd, position, size in extents:
            os.pwrite(fd, bytes(size), position)
        assert data == chunks(staging, image.finish(), "pages-1.img")[0]


def test_reads_may_be_short(monkeypatch):
    """/proc/PID/mem may give less than what was asked for."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, at: preadv(fd, [rooms[0][:1000]], at))
    data = os.urandom(30 * PAGE_BYTES)
    with scattered(data, [3, 5]) as extents:
        room = bytearray(len(data))
        Extents(extents).empty_into(memoryview(room))
    assert data == room


def test_memory_that_is_gone_fails_the_image():
    """The end of a file is what /proc/PID/mem gives of a process that has ended."""
    data = memory(6, 5 * CHUNK_BYTES)
    _, image = begun()
    with scattered(data, []) as extents:
        (extent,) = extents
        extents.append(Extent(extent.source, extent.position + extent.size, 4 * CHUNK_BYTES))
        stream = image.stream("pages-1.img", pages=True)
        with contextlib.suppress(MemoryUnreadable):  # the threads may come to it later
            stream.copy_extents(extents)
        with pytest.raises(MemoryUnreadable, match="process has ended"):
            stream.close()
        with pytest.raises(MemoryUnreadable):
            image.finish()
        image.abort()


def test_memory_that_cannot_be_read_is_named():
    """With its address, and the reason of the system."""
    with open("/proc/self/mem", "rb") as file, pytest.raises(MemoryUnreadable, match="Input/output error at 0x1000"):
        Extents([Extent(file.fileno(), 0x1000, PAGE_BYTES)]).empty_into(memoryview(bytearray(PAGE_BYTES)))
