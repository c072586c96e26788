"""ImageWriter and ImageReader with pipes, threads and odd sizes."""

from __future__ import annotations

import io
import os
import threading
import tracemalloc

import pytest
from image_pair import ID, KEY, reader, writer

from gpucr_hpc.errors import UsageError
from gpucr_hpc.image import buffers, chunks
from gpucr_hpc.image.buffers import Buffer
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.writer import ImageWriter


def fill(fd: int, data: bytes) -> threading.Thread:
    def work() -> None:
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def drained(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def test_pipes_there_and_back(store, staging):
    """Many streams at once through pipes come back through pipes."""
    content = {f"pages-{n}.img": os.urandom(200_000 * n) + bytes(300_000 * (n % 3)) for n in range(9)}
    image = writer(staging, packs=3, node="n1")

    def take(name: str) -> None:
        source, sink = os.pipe()
        feeder = fill(sink, content[name])
        with image.stream(name) as stream:
            assert len(content[name]) == stream.copy_fd(source)
        os.close(source)
        feeder.join()

    run_all(take, content)
    entry = image.finish()
    assert sum(map(len, content.values())) == entry.bytes_plain == image.bytes_plain
    assert image.bytes_stored == entry.bytes_stored
    assert (entry.streams, entry.node, len(entry.packs)) == (9, "n1", 3)
    staging.publish(b"M")
    sizes = 0
    for part in (*entry.packs, entry.index):
        with store.open("41", ID, part.name) as file:
            assert len(file.read()) == part.size_bytes
        sizes += part.size_bytes
    assert sizes == entry.bytes_stored

    with reader(lambda name: store.open("41", ID, name), entry) as back:

        def give(name: str) -> None:
            source, sink = os.pipe()
            got = []
            drain = threading.Thread(target=lambda: got.append(drained(source)))
            drain.start()
            assert back.copy_to_fd(name, sink) == len(content[name])
            os.close(sink)
            drain.join()
            assert content[name] == got[0]

        run_all(give, content)
        assert set(content) == set(back.names())


def run_all(work, names) -> None:
    failures = []

    def guarded(name: str) -> None:
        try:
            work(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
@pytest.mark.parametrize("step", [777_777, CHUNK_BYTES, 5 * CHUNK_BYTES])
def test_sizes_around_a_chunk(staging, size, step):
    """Every size and way of cutting the writes gives the same stream."""
    data = os.urandom(size)
    image = writer(staging)
    with image.stream("a") as stream:
        for at in range(0, size, step):
            assert len(data[at : at + step]) == stream.write(memoryview(data)[at : at + step])
    with reader(staging.open, image.finish()) as back:
        assert data == back.read("a")
        assert size == back.size("a")


def test_zero_and_compressible_data_is_small(staging):
    """Zeros cost nothing, text little, and noise no more than its size and the index."""
    image = writer(staging)
    with image.stream("zero") as stream:
        stream.write(bytes(10 * CHUNK_BYTES + 7))
    assert image.bytes_stored < 200
    with image.stream("text") as stream:
        stream.write(b"all work and no play " * 200_000)
    with image.stream("noise") as stream:
        stream.write(os.urandom(CHUNK_BYTES))
    entry = image.finish()
    assert entry.bytes_stored < CHUNK_BYTES + 100_000
    with reader(staging.open, entry) as back:
        assert bytes(10 * CHUNK_BYTES + 7) == back.read("zero")
        assert back.read("text") == b"all work and no play " * 200_000


def test_names(staging):
    """Bad and repeated names are refused."""
    image = writer(staging)
    image.stream("pages-1.img").close()
    for name in ("pages-1.img", "", ".hidden", "a/b", "..", "a b", "ä"):
        with pytest.raises(UsageError):
            image.stream(name)
    image.abort()


def test_finish_needs_closed_streams(staging):
    """An open stream, or one left by an exception, keeps the image from being finished."""
    image = writer(staging)
    stream = image.stream("a")
    stream.write(b"x")
    stream.__exit__(RuntimeError, None, None)
    with pytest.raises(UsageError, match="'a' is still open"):
        image.finish()
    stream.close()
    stream.close()
    with pytest.raises(UsageError, match="closed"):
        stream.write(b"x")
    image.finish()
    with pytest.raises(UsageError, match="finished"):
        image.finish()
    with pytest.raises(UsageError, match="finished"):
        image.stream("b")
    image.abort()


def test_non_blocking_pipes(staging):
    """A pipe that would block is waited for, both ways."""
    data = os.urandom(3 * CHUNK_BYTES)
    source, sink = os.pipe()
    os.set_blocking(source, False)
    image = writer(staging)
    go = threading.Event()

    def feed() -> None:
        go.wait(10)
        with os.fdopen(sink, "wb") as pipe:
            pipe.write(data)

    thread = threading.Thread(target=feed)
    thread.start()
    with image.stream("a") as stream:
        go.set()
        stream.copy_fd(source)
    thread.join()
    os.close(source)
    with reader(staging.open, image.finish()) as back:
        source, sink = os.pipe()
        os.set_blocking(sink, False)
        got = []
        drain = threading.Thread(target=lambda: got.append(drained(source)))
        drain.start()
        back.copy_to_fd("a", sink)
        os.close(sink)
        drain.join()
    assert data == got[0]


@pytest.mark.parametrize("pipe_bytes", [4096, 1 << 16, 1 << 20])
def test_lent_pages_are_not_written_to_while_they_are_in_the_pipe(staging, monkeypatch, pipe_bytes):
    """A slow reader gets every byte right, whatever is done with the buffers meanwhile."""
    monkeypatch.setattr("gpucr_hpc.image.files.PIPE_BYTES", pipe_bytes)
    parts = [os.urandom(CHUNK_BYTES), bytes(CHUNK_BYTES), b"word" * (CHUNK_BYTES // 4), os.urandom(70_001)]
    data = b"".join(parts[:3] * 12) + parts[3]
    image = writer(staging)
    with image.stream("a") as stream:
        stream.write(data)
    with reader(staging.open, image.finish()) as back:
        kept = back._buffers.give
        given = []

        def spoil(buffer: Buffer) -> None:
            given.append(buffer)
            buffer.view[:] = b"!" * CHUNK_BYTES
            kept(buffer)

        monkeypatch.setattr(back._buffers, "give", spoil)
        source, sink = os.pipe()
        got = []

        def slow() -> None:
            while part := os.read(source, 50_000):
                got.append(part)

        drain = threading.Thread(target=slow)
        drain.start()
        patches = [(5, b"patched"), (2 * CHUNK_BYTES - 2, b"over the edge")]
        back.copy_to_fd("a", sink, patches, lending=True)
        os.close(sink)
        drain.join()
        os.close(source)
    assert given
    for at, new in patches:
        data = data[:at] + new + data[at + len(new) :]
    assert data == b"".join(got)


def test_files_and_bad_descriptors(staging, tmp_path):
    """A regular file is copied too; a closed descriptor is an OSError."""
    path = tmp_path / "source"
    path.write_bytes(b"x" * 100_000)
    image = writer(staging)
    with image.stream("a") as stream, path.open("rb") as file:
        assert stream.copy_fd(file.fileno()) == 100_000
    bad = image.stream("b")
    with pytest.raises(OSError, match="Bad file descriptor"):
        bad.copy_fd(999_999)
    image.abort()


def test_memory_does_not_grow_with_the_data():
    """Forty times the data takes no more memory."""

    class Nowhere(io.RawIOBase):
        def seekable(self) -> bool:
            return True

        def seek(self, at: int, whence: int = 0) -> int:
            self.at = self.end if whence == 2 else at
            return self.at

        def write(self, data) -> int:
            self.end = max(getattr(self, "end", 0), self.at + len(data))
            return len(data)

    def peak(mib: int) -> int:
        noise = bytearray(os.urandom(CHUNK_BYTES))
        tracemalloc.start()
        image = ImageWriter(lambda _: Nowhere(), checkpoint=ID, node_rank=0, key=KEY, workers=2)
        with image.stream("a") as stream:
            for number in range(mib):
                noise[:4] = number.to_bytes(4, "little")
                stream.write(noise)
        image.finish()
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(2)
    assert peak(200) < 16 * CHUNK_BYTES


def test_old_cryptography_without_encrypt_into(staging, monkeypatch):
    """Debian's older python3-cryptography has no encrypt_into; images are the same."""

    class Old:
        def __init__(self, cipher) -> None:
            self.encrypt, self.decrypt = cipher.encrypt, cipher.decrypt

    data = os.urandom(CHUNK_BYTES + 5) + b"text " * 100_000
    image = writer(staging)
    image._packs.origin.cipher = Old(image._packs.origin.cipher)
    with image.stream("a") as stream:
        stream.write(data)
    entry = image.finish()
    with reader(staging.open, entry) as back:
        assert data == back.read("a")
        back._origins[0][0].cipher = Old(back._origins[0][0].cipher)
        assert data == back.read("a")


def test_arguments(staging):
    """Ranks, packs and ids outside of the format are refused."""
    for change in ({"node_rank": -1}, {"node_rank": 1 << 16}, {"packs": 0}, {"packs": 101}, {"checkpoint": "x"}):
        with pytest.raises(UsageError):
            writer(staging, **change)


def filled(data: bytes) -> Buffer:
    buffer = Buffer(CHUNK_BYTES)
    buffer.view[: len(data)] = data
    return buffer


@pytest.fixture(params=["system", "package"])
def lz4_library(request, monkeypatch):
    """The system's liblz4 where there is one, and the Python package."""
    if request.param == "package":
        monkeypatch.setattr(buffers, "_lz4", buffers._Package())
    elif isinstance(buffers._lz4, buffers._Package):
        pytest.skip("no liblz4.so.1")


def test_squeeze_only_when_it_pays(lz4_library):
    """Noise stays raw after a sample; what LZ4 does not bring below 7/8 stays raw too."""
    room, back = Buffer(CHUNK_BYTES), Buffer(CHUNK_BYTES)
    for size in (1, 2, 100, CHUNK_BYTES):
        assert 0 == chunks.squeeze(filled(os.urandom(size)), 0, size, room)
    mostly = bytes(chunks.SAMPLE_BYTES) + os.urandom(CHUNK_BYTES - chunks.SAMPLE_BYTES)
    assert 0 == chunks.squeeze(filled(mostly), 0, CHUNK_BYTES, room)
    length = chunks.squeeze(filled(b"ab" * 500_000), 0, 1_000_000, room)
    assert 0 < length < 10_000
    assert buffers.decompress(room, length, back, 1_000_000)
    assert b"ab" * 500_000 == back.view[:1_000_000]
    for wrong in (999_999, 1_000_001, CHUNK_BYTES + 1):
        assert not buffers.decompress(room, length, back, wrong)
    assert not buffers.decompress(filled(os.urandom(5000)), 5000, back, 1_000_000)


@pytest.mark.parametrize("size", [1, 2, 4096, CHUNK_BYTES - 1, CHUNK_BYTES])
def test_zero_test_sees_every_byte(size):
    """One bit in the first, middle or last byte makes a chunk not zero."""
    buffer = Buffer(CHUNK_BYTES)
    assert chunks.is_zero(buffer, 0, size)
    for at in {0, size // 2, size - 1}:
        buffer.view[at] = 1
        assert not chunks.is_zero(buffer, 0, size)
        buffer.view[at] = 0
