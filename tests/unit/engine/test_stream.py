"""The far end of CRIU's stream: a dump into an image and a restore out of it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_criu import FakeCriu, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucr_hpc.engine import stream
from gpucr_hpc.errors import GpucrError, ImageError
from gpucr_hpc.image import files
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import ImageEntry
from gpucr_hpc.store.memory import MemoryStaging, MemoryStore

JOB, ID, KEY = "41", "20261127T232501Z-3f9a", DataKey(b"k" * 32, b"i" * 32)
LIMIT_S = 10.0
NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,150}", fullmatch=True).filter(lambda n: n != "inventory.img")
FILES = st.dictionaries(NAMES, st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(bytes)), max_size=6)


@pytest.fixture(autouse=True)
def peer(monkeypatch):
    """CRIU is root; here it is us."""
    monkeypatch.setattr(stream._Connection, "peer_uid", os.getuid())


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpucr-") as name:  # a short path: sockets have 108 bytes
        yield Path(name)


def begin(directory: Path) -> tuple[MemoryStore, MemoryStaging, ImageWriter, stream.Capture]:
    store = MemoryStore()
    staging = store.begin(JOB, ID)
    writer = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY)
    capture = stream.Capture(stream.listen(directory, stream.CAPTURE_SOCKET), writer)
    capture.start()
    return store, staging, writer, capture


@contextmanager
def capturing(directory: Path) -> Iterator[tuple[stream.Capture, FakeCriu]]:
    """A capture with a CRIU that is connected to it; everything is closed behind it."""
    _, staging, writer, capture = begin(directory)
    with FakeCriu(directory / stream.CAPTURE_SOCKET) as criu:
        yield capture, criu
    wait(lambda: capture.closed and capture._open == 0)
    writer.abort()
    staging.abort()


def wait(condition) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def dumped(directory: Path, files: dict[str, bytes], **how) -> tuple[MemoryStore, ImageEntry, stream.Capture]:
    store, staging, writer, capture = begin(directory)
    with FakeCriu(directory / stream.CAPTURE_SOCKET) as criu:
        criu.dump(files, **how)
        assert [*files, "inventory.img"] == capture.drain(LIMIT_S)
        entry = writer.finish()
    staging.publish(b"manifest")
    wait(lambda: capture.closed)
    return store, entry, capture


def restored(directory: Path, store: MemoryStore, entry: ImageEntry, names: list[str]) -> list[bytes | None]:
    with ImageReader(lambda name: store.open(JOB, ID, name), entry, checkpoint=ID, key=KEY) as reader:
        serve = stream.Serve(stream.listen(directory, stream.SERVE_SOCKET), reader, {})
        serve.start()
        with FakeCriu(directory / stream.SERVE_SOCKET) as criu:
            content = [criu.read(name) for name in names]
        wait(lambda: serve.closed and serve._open == 0)
        serve.check()
    return content


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, st.lists(st.integers(0, 5), max_size=9), st.sampled_from([1 << 12, 1 << 16]))
def test_dump_comes_back(files, order, piece_bytes):
    """Any names and sizes, written in any interleaving, come back by name in any order."""
    with tempfile.TemporaryDirectory(prefix="gpucr-") as name:
        store, entry, _ = dumped(Path(name), files, order=order, piece_bytes=piece_bytes)
        wanted = sorted([*files, "inventory.img"])
        content = files | {"inventory.img": b"inventory"}
        assert [content[n] for n in wanted] == restored(Path(name), store, entry, wanted)


def test_memory_comes_through_a_larger_pipe(directory, monkeypatch):
    """Only that: what all pipes of a user hold is limited. Where the kernel refuses, the dump goes on."""
    sizes = []

    def widen(fd: int, size_bytes: int = files.PIPE_BYTES) -> int:
        sizes.append(size_bytes)
        return files.widen_pipe(fd, size_bytes)

    monkeypatch.setattr(stream, "widen_pipe", widen)
    content = {"core-1.img": b"c", "pages-1.img": b"p" * 9000, "pages.img": b"p"}
    store, entry, _ = dumped(directory, content)
    assert sizes.count(stream.MEMORY_PIPE_BYTES) == 1
    assert list(content.values()) == restored(directory, store, entry, list(content))


def test_pipe_limit_is_raised_and_never_lowered(tmp_path, monkeypatch):
    limit = tmp_path / "pipe-max-size"
    monkeypatch.setattr(stream, "_MAX_PIPE", limit)
    limit.write_text("1048576\n")
    for wanted, found in ((0, 1 << 20), (8 << 20, 8 << 20), (4 << 20, 8 << 20)):
        stream.raise_pipe_limit(wanted)
        assert stream.pipe_limit() == found
    limit.unlink()
    with pytest.raises(OSError):
        stream.raise_pipe_limit(1)


def test_file_is_asked_for_again_and_missing_ones_do_not_exist(directory):
    """CRIU opens some files twice and looks for files of other versions."""
    store, entry, _ = dumped(directory, {"pages-1.img": b"p" * 70_000})
    asked = ["pages-1.img", "other.img", "pages-1.img"]
    assert [b"p" * 70_000, None, b"p" * 70_000] == restored(directory, store, entry, asked)


def test_moment_of_the_freeze_is_the_first_request(directory):
    before = time.monotonic()
    _, _, capture = dumped(directory, {"a.img": b"a"})
    assert capture.began is not None
    assert before <= capture.began <= time.monotonic()


def test_drain_waits_for_the_last_byte(directory):
    """Pages in the pipes are live pages: nothing may run on before they are read."""
    with capturing(directory) as (capture, criu):
        criu.begin("pages-1.img")
        criu.begin("inventory.img")
        criu.end("inventory.img")
        with pytest.raises(ImageError, match="ended before its last file"):
            capture.drain(0.1)
        criu.write("pages-1.img", b"late")
        criu.end("pages-1.img")
        assert ["pages-1.img", "inventory.img"] == capture.drain(LIMIT_S)


def test_aborted_peer_is_no_dump(directory):
    """CRIU that dies before inventory.img leaves nothing that looks complete."""
    with capturing(directory) as (capture, criu):
        criu.begin("core-2.img")
        criu.end("core-2.img")
        criu.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ImageError, match="ended before its last file"):
            capture.drain(LIMIT_S)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\x7f",
        b"\x03\0\0\0\x12\x01a",
        request(b"../escape"),
        request(b".hidden"),
        request(b"a/b"),
        request(b"a\0b"),
        request("pägs".encode()),
    ],
)
def test_bad_request_ends_the_stream(directory, data):
    """A name that is no file name, an odd length or field: refused, and CRIU notices by the end of its stream."""
    with capturing(directory) as (capture, criu):
        criu.sock.sendall(data)
        with pytest.raises(ImageError, match="request"):
            capture.drain(LIMIT_S)
        assert criu.sock.recv(1) == b""


def test_request_without_a_descriptor(directory):
    with capturing(directory) as (capture, criu):
        criu.sock.sendall(request(b"a.img") + b"\0")
        with pytest.raises(ImageError, match="a descriptor did not arrive"):
            capture.drain(LIMIT_S)


def test_foreign_peer_is_refused(directory, monkeypatch):
    """Who connects is what the kernel says."""
    monkeypatch.setattr(stream._Connection, "peer_uid", os.getuid() + 1)
    with capturing(directory) as (capture, criu):
        with pytest.raises(ImageError, match="the peer is not uid"):
            capture.drain(LIMIT_S)
        assert criu.sock.recv(1) == b""


def test_abort_ends_a_waiting_listener(directory):
    """A CRIU that never came does not leave a thread behind."""
    _, staging, writer, capture = begin(directory)
    capture.abort()
    wait(lambda: capture.closed)
    with pytest.raises(ImageError):
        capture.drain(LIMIT_S)
    writer.abort()
    staging.abort()


def test_full_store_stops_the_dump(directory):
    """The writer's own error comes out, not a broken pipe."""
    store = MemoryStore(capacity_bytes=100_000)
    staging = store.begin(JOB, ID)
    writer = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY)
    capture = stream.Capture(stream.listen(directory, stream.CAPTURE_SOCKET), writer)
    capture.start()
    failed = pytest.raises((OSError, GpucrError))  # whichever notices first
    with FakeCriu(directory / stream.CAPTURE_SOCKET) as criu, failed:
        criu.dump({"pages-1.img": os.urandom(8 << 20)})
        capture.drain(LIMIT_S)
        writer.finish()
    wait(lambda: capture.closed and capture._open == 0)
    writer.abort()
    staging.abort()
    assert [] == store.list()


def test_reader_that_stops_early_is_no_error(directory):
    """CRIU may close a file before its end; the stream goes on."""
    store, entry, _ = dumped(directory, {"pages-1.img": bytes(4 << 20), "a.img": b"a"})
    with ImageReader(lambda name: store.open(JOB, ID, name), entry, checkpoint=ID, key=KEY) as reader:
        serve = stream.Serve(stream.listen(directory, stream.SERVE_SOCKET), reader, {})
        serve.start()
        with FakeCriu(directory / stream.SERVE_SOCKET) as criu:
            criu.sock.sendall(request(b"pages-1.img"))
            criu.sock.recv(6, socket.MSG_WAITALL)
            read, write = os.pipe()
            socket.send_fds(criu.sock, [b"\0"], [write])
            os.close(write)
            os.read(read, 10)
            os.close(read)
            assert criu.read("a.img") == b"a"
        wait(lambda: serve.closed and serve._open == 0)
        serve.check()
