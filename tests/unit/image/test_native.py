"""The steps of chunks in C do what those in Python do."""

from __future__ import annotations

import errno
import os
import random

import pytest
from chunks_library import set_library
from hypothesis import given
from hypothesis import strategies as st
from image_pair import ID, reader, writer

from gpucr_hpc.image import cutting, native
from gpucr_hpc.image.buffers import Buffer
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.files import write_spans
from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore


def pages(seed: int, count: int) -> bytes:
    """Memory of all kinds: zero, text, noise, and pages of which there are several."""
    rng = random.Random(seed)
    word = rng.randbytes(16)
    made = []
    while len(made) < count:
        page = rng.choice([bytes(4096), word * 256, rng.randbytes(4096), rng.randbytes(64) * 64])
        made += [page if rng.random() < 0.5 else rng.randbytes(4096) for _ in range(rng.randrange(1, 200))]
    return b"".join(made[:count])


def written(tmp_path, monkeypatch, kind, streams, chunks):
    """All files of an image, by one thread that takes so many MiB at a time into one pack, under the same salt."""
    set_library(kind, monkeypatch)
    monkeypatch.setattr("gpucr_hpc.image.writer._part_bytes", lambda _: chunks * CHUNK_BYTES)
    monkeypatch.setattr("gpucr_hpc.image.writer.secrets.token_bytes", bytes)
    monkeypatch.setattr("gpucr_hpc.image.parts._SMALL_BYTES", 0)  # those are sealed by whoever writes the stream
    staging = PosixStore(tmp_path / kind).begin("41", ID)
    image = writer(staging, packs=1, workers=1)
    for name, data in streams.items():
        with image.stream(name, pages=name.startswith("pages")) as stream:
            stream.write(data)
    entry = image.finish()
    folder = tmp_path / kind / "41" / f"{ID}.partial"
    return entry, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_both_write_the_same_bytes(tmp_path, monkeypatch, seed, chunks):
    rng = random.Random(seed)
    streams = {f"pages-{n}.img": pages(seed * 10 + n, rng.randrange(1, 2000)) for n in range(3)}
    # The same memory a second time, what is no whole page, and what is cut into pieces of one size.
    streams |= {"pages-9.img": streams["pages-1.img"] + b"tail" * seed, "core-1.img": rng.randbytes(100_000)}
    here, files = written(tmp_path, monkeypatch, "python", streams, chunks)
    there, others = written(tmp_path, monkeypatch, "c", streams, chunks)
    assert here == there
    assert files == others


@pytest.mark.parametrize("first", ["python", "c"])
def test_one_reads_what_the_other_wrote(monkeypatch, first):
    set_library(first, monkeypatch)
    staging = MemoryStore().begin("41", ID)
    image = writer(staging, workers=3)
    data = pages(7, 1500)
    with image.stream("pages-1.img", pages=True) as stream:
        stream.write(data)
    entry = image.finish()
    set_library("c" if first == "python" else "python", monkeypatch)
    with reader(staging.open, entry) as back:
        assert back.read("pages-1.img") == data


def test_chunks_are_the_same_however_much_is_taken_at_a_time(tmp_path, monkeypatch):
    data = pages(3, 5000)
    found = []
    for chunks in (1, 3, 4):
        entry, _ = written(tmp_path / str(chunks), monkeypatch, "c", {"pages-1.img": data}, chunks)
        with reader(PosixStore(tmp_path / str(chunks) / "c").attach("41", ID).open, entry) as back:
            found.append([chunk[2:] for chunk in back.index.streams["pages-1.img"].places()])
            assert back.read("pages-1.img") == data
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["python", "c"])
def test_spans_are_written_until_one_fails(tmp_path, monkeypatch, kind):
    set_library(kind, monkeypatch)
    _PAGES.view[:100] = os.urandom(100)
    with open(tmp_path / "file", "w+b") as file:
        assert write_spans(file.fileno(), _PAGES, [(0, 10, 5), (50, 3, 7), (0, 99, 0)]) == (0, 0)
        assert file.read() == bytes(3) + bytes(_PAGES.view[50:57]) + bytes(_PAGES.view[0:5])
    with open(tmp_path / "file", "rb") as file:
        assert write_spans(file.fileno(), _PAGES, [(0, 0, 0), (0, 7, 5)]) == (errno.EBADF, 7)


_WORDS = st.sampled_from([0, 1, 2, 98, 2**64 - 1, 2**63 + 5])


@given(st.lists(st.tuples(_WORDS, _WORDS), min_size=1, max_size=256), st.integers(0, 255), st.integers(0, 2))
def test_cuts_are_the_same(marks, since, before):
    """Sums of two words may be larger than a word."""
    buffer = _PAGES
    for number, (one, two) in enumerate(marks):
        at = number * cutting.PAGE_BYTES
        buffer.view[at : at + 8] = one.to_bytes(8, "little")
        buffer.view[at + 2048 : at + 2056] = two.to_bytes(8, "little")
    size = len(marks) * cutting.PAGE_BYTES
    found = cutting.marks(buffer.view[:size])
    ends, last = native.library.cut(buffer.address, len(marks), since, before)
    assert (ends, bool(last)) == (cutting.cuts(found, since, before), bool(found[-1]))


_PAGES = Buffer(CHUNK_BYTES)


@pytest.fixture(autouse=True)
def _in_c(monkeypatch):
    set_library("c", monkeypatch)


def test_a_library_of_another_version_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_VERSION", native._VERSION + 1)
    for path in (tmp_path / "none.so", native.LIBRARY):
        found, reason = native.load(path)
        assert found is None
        assert str(path) in reason


def test_with_an_old_openssl_few_processors_do_without(tmp_path, monkeypatch):
    """It encrypts at half the speed there; more processors gain more from calls that do not wait for each other."""

    class Old:
        openssl = 0x30000130

    monkeypatch.setattr(native, "Native", lambda _: Old())
    for count, used in ((2, False), (4, True)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: range(count))
        found, reason = native.load(tmp_path)
        assert (found is not None) is used
        assert reason == ("" if used else "OpenSSL 3.0 is slow for 2 processors")
