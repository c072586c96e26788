"""ImageWriter and ImageReader when disks are full or break, and when the other side goes away."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
import threading

import pytest
from image_pair import ID, KEY, reader, writer

from gpucr_hpc.errors import ImageError, IntegrityError, StoreError, StoreFull, UsageError
from gpucr_hpc.image import native
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore


def test_abort_while_streams_are_written(staging):
    """After abort every writer gets an error and no thread hangs."""
    image = writer(staging)
    started, seen = threading.Event(), []

    def work() -> None:
        try:
            with image.stream("a") as stream:
                while True:
                    stream.write(os.urandom(CHUNK_BYTES))
                    started.set()
        except ImageError as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    image.abort()
    image.abort()
    thread.join(10)
    assert not thread.is_alive()
    assert "given up" in str(seen[0])
    with pytest.raises(ImageError):
        image.finish()


def test_full_disk_is_raised_to_every_caller(tmp_path):
    """A disk that fills up gives StoreFull with the pack's name in write, in close or at the latest in finish."""
    store = MemoryStore(capacity_bytes=3 * CHUNK_BYTES)
    staging = store.begin("41", ID)
    image = writer(staging)

    def write_all() -> None:
        with image.stream("a") as stream:
            for _ in range(50):
                stream.write(os.urandom(CHUNK_BYTES))
        image.finish()

    with pytest.raises(StoreFull, match=r"r0000-p0.\.pack"):
        write_all()
    with pytest.raises(StoreFull):
        image.stream("b")
    with pytest.raises(StoreFull):
        image.finish()
    image.abort()
    staging.abort()
    assert store.free_bytes() == 3 * CHUNK_BYTES


def test_full_disk_at_the_index():
    """A disk that is full only when the index is written fails the image."""
    store = MemoryStore(capacity_bytes=1000)
    image = writer(store.begin("41", ID))
    with image.stream("a") as stream:
        stream.write(os.urandom(1000 - 128 - 10))
    for _ in range(2):
        with pytest.raises(StoreFull, match=r"r0000\.index"):
            image.finish()
    image.abort()


def test_full_disk_when_packs_are_created():
    """create() that raises leaves no open file behind."""
    opened = []

    def create(name: str):
        if opened:
            raise StoreFull(path=name, reason="no space")
        opened.append(io.BytesIO())
        return opened[0]

    with pytest.raises(StoreFull):
        ImageWriter(create, checkpoint=ID, node_rank=0, key=KEY)
    assert opened[0].closed


def test_file_size_limit_of_the_kernel(tmp_path):
    """A real write error of the kernel (EFBIG by RLIMIT_FSIZE) is StoreFull; the staging can be aborted."""
    code = """
import os, resource, sys
from gpucr_hpc.errors import StoreFull
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.posix import PosixStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
store = PosixStore(sys.argv[1])
staging = store.begin("41", sys.argv[2])
image = ImageWriter(staging.create, checkpoint=sys.argv[2], node_rank=0, key=DataKey.generate())
try:
    with image.stream("a") as stream:
        for _ in range(20):
            stream.write(os.urandom(1 << 20))
    image.finish()
except StoreFull as error:
    image.abort()
    staging.abort()
    assert store.list() == store.orphans(0) == []
    print("full:", error)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    args = [sys.executable, "-c", code, str(tmp_path), ID]
    done = subprocess.run(args, check=True, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("full: r0000-p0")
    assert os.strerror(errno.EFBIG) in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 2 << 20


def test_any_failure_of_a_worker_fails_the_image(staging, monkeypatch):
    """Even a bug on a worker's thread never gives an image that looks complete."""

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr("gpucr_hpc.image.packs.seal", broken)
    image = writer(staging)
    image.stream("a").write(b"x" * CHUNK_BYTES)
    with pytest.raises((ImageError, UsageError)):
        image.finish()
    image.abort()


def test_short_writes_are_completed(tmp_path, monkeypatch):
    """A pwrite that takes only a part is continued."""
    real = os.pwrite
    monkeypatch.setattr("gpucr_hpc.image.files.os.pwrite", lambda fd, data, at: real(fd, data[:70_001], at))
    staging = PosixStore(tmp_path).begin("41", ID)
    data = os.urandom(CHUNK_BYTES)
    image = writer(staging)
    with image.stream("a") as stream:
        stream.write(data)
    with reader(staging.open, image.finish()) as back:
        assert data == back.read("a")


def test_read_error_of_the_disk_is_a_store_error(tmp_path, monkeypatch, steps):
    """EIO from a pack is a StoreError that names it, not damage."""
    staging = PosixStore(tmp_path).begin("41", ID)
    image = writer(staging)
    with image.stream("a") as stream:
        stream.write(b"hello")

    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with reader(staging.open, image.finish()) as back:
        if steps == "c":
            monkeypatch.setattr(native.Native, "open", lambda *_: (errno.EIO, []))
        monkeypatch.setattr("gpucr_hpc.image.files.os.preadv", broken)
        with pytest.raises(StoreError, match=r"r0000-p0.\.pack: Input/output error"):
            back.read("a")


def test_pack_cut_while_it_is_open(tmp_path):
    """A pack that becomes shorter after the open is found by verify and by reading."""
    store = PosixStore(tmp_path)
    staging = store.begin("41", ID)
    image = writer(staging, packs=1)
    with image.stream("a") as stream:
        stream.write(os.urandom(1000))
    with reader(staging.open, image.finish()) as back:
        os.truncate(tmp_path / "41" / f"{ID}.partial" / "r0000-p00.pack", 100)
        with pytest.raises(IntegrityError, match="100 bytes"):
            back.verify()
        with pytest.raises(IntegrityError, match="ends inside"):
            back.read("a")


def test_broken_pipe_is_raised(staging):
    """The other side's close is BrokenPipeError, and the reader can be used on."""
    image = writer(staging)
    with image.stream("a") as stream:
        stream.write(os.urandom(4 * CHUNK_BYTES))
    with reader(staging.open, image.finish()) as back:
        source, sink = os.pipe()
        os.close(source)
        with pytest.raises(BrokenPipeError):
            back.copy_to_fd("a", sink)
        os.close(sink)
        assert len(back.read("a")) == 4 * CHUNK_BYTES
