"""Memory through a pipe: copied by several threads, the image that of one."""

from __future__ import annotations

import contextlib
import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr_hpc.errors import ImageError, StoreFull
from gpucr_hpc.image import relay
from gpucr_hpc.image.buffers import Buffer, lend
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.cutting import PAGE_BYTES
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore

ID, KEY = "20261127T232501Z-3f9a", DataKey(b"k" * 32, b"i" * 32)
LIMIT_S = 20


def begun(capacity_bytes: int | None = None, **values):
    store = MemoryStore() if capacity_bytes is None else MemoryStore(capacity_bytes=capacity_bytes)
    staging = store.begin("41", ID)
    values = {"workers": 3, **values}
    return staging, ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY, **values)


def memory(seed: int, size: int) -> bytes:
    rng, data = random.Random(seed), bytearray()
    while len(data) < size:
        run = rng.choice([1, 30, 300]) * PAGE_BYTES
        data += rng.choice([bytes, rng.randbytes, lambda n: b"words " * (n // 6 + 1)])(run)
    return bytes(data[:size])


def fed(fd: int, data: bytes, piece_bytes: int) -> threading.Thread:
    def work() -> None:
        with os.fdopen(fd, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            for at in range(0, len(data), piece_bytes):
                left = memoryview(data)[at : at + piece_bytes]
                while left:
                    left = left[pipe.write(left) :]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def chunks(staging, entry, name: str) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A stream's bytes, and the length and id of each of its chunks."""
    with ImageReader(staging.open, entry, checkpoint=ID, key=KEY) as back:
        found = back.index.streams[name]
        return back.read(name), [(found.chunk(n).plain, found.chunk(n).id) for n in range(len(found))]


def written(data: bytes) -> list[tuple[int, bytes]]:
    staging, image = begun()
    with image.stream("pages-1.img", pages=True) as stream:
        stream.write(data)
    return chunks(staging, image.finish(), "pages-1.img")[1]


def piped(data: bytes, piece_bytes: int, **values) -> list[tuple[int, bytes]]:
    staging, image = begun(**values)
    source, sink = os.pipe()
    feeder = fed(sink, data, piece_bytes)
    with image.stream("pages-1.img", pages=True) as stream:
        assert len(data) == stream.copy_fd(source)
    os.close(source)
    feeder.join(LIMIT_S)
    back, found = chunks(staging, image.finish(), "pages-1.img")
    assert data == back
    return found


SIZES = st.one_of(
    st.integers(0, 9 * CHUNK_BYTES), st.integers(0, 9).map(lambda n: n * CHUNK_BYTES), st.integers(0, 3 * PAGE_BYTES)
)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), SIZES, st.sampled_from([PAGE_BYTES, 5 * PAGE_BYTES, 300 * PAGE_BYTES]), st.booleans())
def test_chunks_are_those_of_memory_that_is_written(seed, size, piece_bytes, held):
    """Which way the bytes come, and whether they wait to be sealed, has no influence on the image."""
    data = memory(seed, size)
    room = {"room_bytes": 16 * CHUNK_BYTES, "expected_bytes": 10 * CHUNK_BYTES} if held else {}
    assert written(data) == piped(data, piece_bytes, **room)


@pytest.mark.parametrize("piece_bytes", [700, PAGE_BYTES - 1, 3 * PAGE_BYTES + 5])
def test_pieces_of_pages(piece_bytes):
    """A pipe whose slots are not whole pages fills ours before it has a part: no thread waits for ever."""
    data = Buffer(3 * CHUNK_BYTES)
    data.view[:] = memory(1, data.size)
    staging, image = begun()
    source, sink = os.pipe()

    def feed() -> None:
        at = 0
        while at < data.size:
            at += lend(sink, data, at, min(piece_bytes, data.size - at))
        os.close(sink)

    threading.Thread(target=feed, daemon=True).start()
    with image.stream("pages-1.img", pages=True) as stream:
        assert data.size == stream.copy_fd(source)
    os.close(source)
    assert (bytes(data.view), written(data.view)) == chunks(staging, image.finish(), "pages-1.img")


@pytest.mark.parametrize("refusal", ["small", "none"])
def test_without_pipes_that_are_large_enough(monkeypatch, refusal):
    """The kernel limits the pipes of a user: then it takes longer, that is all."""

    def refuse(*_):
        raise OSError(24, "Too many open files")

    if refusal == "small":
        monkeypatch.setattr(relay, "widen_pipe", lambda *_: 65536)
    else:
        monkeypatch.setattr(relay.os, "pipe2", refuse)
    data = memory(2, 5 * CHUNK_BYTES + 77)
    assert written(data) == piped(data, PAGE_BYTES)


@pytest.mark.parametrize("room", [0, 8])
def test_pages_may_change_as_soon_as_the_stream_is_closed(room):
    """Pages in CRIU's pipe are the job's own: what it does to them after it was let go is not in the image."""
    sizes = {"room_bytes": room * CHUNK_BYTES, "expected_bytes": room * CHUNK_BYTES} if room else {}
    for parts in (1, 3, 6):
        staging, image = begun(**sizes)
        live = [Buffer(CHUNK_BYTES) for _ in range(parts)]
        wanted = b""
        for number, buffer in enumerate(live):
            buffer.view[:] = random.Random(number).randbytes(CHUNK_BYTES)
            wanted += bytes(buffer.view)
        source, sink = os.pipe()

        def feed(live=live, sink=sink) -> None:
            for buffer in live:
                at = 0
                while at < CHUNK_BYTES:
                    at += lend(sink, buffer, at, CHUNK_BYTES - at)
            os.close(sink)

        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        with image.stream("pages-1.img", pages=True) as stream:
            stream.copy_fd(source)
        for buffer in live:
            buffer.view[:] = b"!" * CHUNK_BYTES
        os.close(source)
        assert wanted == chunks(staging, image.finish(), "pages-1.img")[0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("how", ["finish", "abort", "full"])
def test_no_pipe_is_left(how):
    """Whatever becomes of the image."""
    before = descriptors()
    data = memory(3, 20 * CHUNK_BYTES)
    staging, image = begun(capacity_bytes=2 * CHUNK_BYTES if how == "full" else None)
    source, sink = os.pipe()
    feeder = fed(sink, random.Random(1).randbytes(len(data)) if how == "full" else data, PAGE_BYTES)
    expected = pytest.raises(StoreFull) if how == "full" else contextlib.nullcontext()
    with expected, image.stream("pages-1.img", pages=True) as stream:
        stream.copy_fd(source)
    os.close(source)
    feeder.join(LIMIT_S)
    if how == "finish":
        image.finish()
    else:
        image.abort()
    staging.abort()
    assert before == descriptors()


def test_giving_up_wakes_who_waits():
    """A store that stands still holds the threads up, and these the pipes: who hands pages on waits. When the image is
    given up it hears so, though nobody has read what it hands on."""
    staging, image = begun(workers=1)
    stands, go = threading.Event(), threading.Event()
    kept = image._packs.store

    def slow(*args):
        stands.set()
        assert go.wait(LIMIT_S)
        return kept(*args)

    image._packs.store = slow
    source, sink = os.pipe()
    fed(sink, random.Random(5).randbytes(40 * CHUNK_BYTES), PAGE_BYTES)
    seen = []

    def take() -> None:
        try:
            with image.stream("pages-1.img", pages=True) as stream:
                stream.copy_fd(source)
        except ImageError as error:
            seen.append(str(error))

    pump = threading.Thread(target=take, daemon=True)
    pump.start()
    assert stands.wait(LIMIT_S)
    image.give_up()
    go.set()
    pump.join(LIMIT_S)
    assert not pump.is_alive()
    assert "given up" in seen[0]
    os.close(source)
    image.abort()
    staging.abort()
