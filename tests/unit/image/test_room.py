"""ImageWriter with room for what is read before it is sealed."""

from __future__ import annotations

import os
import threading

import pytest

from gpucr_hpc.errors import ImageError
from gpucr_hpc.image import cutting
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore

ID, KEY = "20261127T232501Z-3f9a", DataKey(b"k" * 32, b"i" * 32)
HEADERS = 1000  # bytes: more than those of all packs
LIMIT_S = 20


def feed(sink: int, data: bytes) -> None:
    """All of the data."""
    left = memoryview(data)
    while left:
        left = left[os.write(sink, left) :]


class Held:
    """An image with two workers and so many chunks of room, in a store in memory."""

    def __init__(self, room: int, expected: int) -> None:
        self.store = MemoryStore()
        self.staging = self.store.begin("41", ID)
        self.image = ImageWriter(
            self.staging.create,
            checkpoint=ID,
            node_rank=0,
            key=KEY,
            workers=2,
            room_bytes=room * CHUNK_BYTES,
            expected_bytes=expected * CHUNK_BYTES,
        )

    def take(self, name: str, data: bytes) -> None:
        with self.image.stream(name) as stream:
            stream.write(data)

    def check(self, content: dict[str, bytes]) -> None:
        entry = self.image.finish()
        self.staging.publish(b"M")
        with ImageReader(lambda name: self.store.open("41", ID, name), entry, checkpoint=ID, key=KEY) as image:
            assert content == {name: image.read(name) for name in content}


def test_nothing_is_sealed_before_the_end_when_all_fits_in():
    """Reading has the processors for itself; what is small is sealed at once, since it would only waste a buffer."""
    content = {"pages-1.img": os.urandom(5 * CHUNK_BYTES), "small": b"s" * 3000}
    held = Held(room=8, expected=6)
    held.take("pages-1.img", content["pages-1.img"])
    assert held.image.bytes_stored < HEADERS
    assert held.image.bytes_plain == 5 * CHUNK_BYTES
    held.take("small", content["small"])
    held.check(content)


def test_nothing_is_cut_before_the_end_when_all_fits_in(monkeypatch):
    """The job stands still until all is read: whatever can wait does. Parts come in any order."""
    cut = []
    places = cutting.cut
    monkeypatch.setattr(cutting, "cut", lambda buffer, size, *rest: cut.append(size) or places(buffer, size, *rest))
    data = os.urandom(5 * CHUNK_BYTES + 20 * cutting.PAGE_BYTES)
    held = Held(room=8, expected=6)
    source, sink = os.pipe()
    feeder = threading.Thread(target=lambda: (os.write(sink, data), os.close(sink)), daemon=True)
    feeder.start()
    with held.image.stream("pages-1.img", pages=True) as stream:
        assert stream.copy_fd(source) == len(data)
    os.close(source)
    feeder.join(LIMIT_S)
    assert cut == []
    held.check({"pages-1.img": data})
    assert sum(cut) == len(data)


def test_a_part_that_cannot_be_read_ends_the_image():
    """Whoever waits for it, or for what comes after it, is told."""

    class Gone:
        def empty_into(self, room: memoryview) -> None:
            raise OSError(f"gone with {len(room)} bytes")

        def done(self, *, empty: bool) -> None:
            assert not empty

    held = Held(room=8, expected=6)
    stream = held.image.stream("pages-1.img", pages=True)
    stream._submit(CHUNK_BYTES, Gone())
    with pytest.raises(ImageError, match="gone"):
        stream.close()
    held.image.abort()


@pytest.mark.parametrize("expected", [6, 40])
def test_beyond_the_room_only_what_must_be_is_sealed(expected: int):
    """The job stands still until all is read: what fits in waits, whether or not it was known that not all would."""
    content = {"pages-1.img": os.urandom(40 * CHUNK_BYTES)}
    held = Held(room=20, expected=expected)
    work = threading.Thread(target=held.take, args=("pages-1.img", content["pages-1.img"]), daemon=True)
    work.start()
    work.join(LIMIT_S)
    assert not work.is_alive()
    assert CHUNK_BYTES < held.image.bytes_stored < 25 * CHUNK_BYTES
    held.check(content)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_several_streams_share_a_room_that_is_too_small(room: int):
    """Each that waits for a place gets one, whichever order they come in, from pipes and from buffers."""
    content = {f"pages-{number}.img": os.urandom(12 * CHUNK_BYTES + 4096 * number) for number in range(6)}
    held = Held(room=room, expected=80)

    def by_pipe(name: str) -> None:
        source, sink = os.pipe()
        feeder = threading.Thread(target=lambda: (feed(sink, content[name]), os.close(sink)), daemon=True)
        feeder.start()
        with held.image.stream(name, pages=True) as stream:
            stream.copy_fd(source)
        os.close(source)
        feeder.join(LIMIT_S)

    def by_buffer(name: str) -> None:
        held.take(name, content[name])

    ways = [by_pipe, by_buffer]
    threads = [
        threading.Thread(target=ways[number % 2], args=(name,), daemon=True) for number, name in enumerate(content)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    held.check(content)


def test_giving_up_ends_what_is_held():
    """The job has ended: the rest is not sealed, and whoever waits for it hears why."""
    held = Held(room=8, expected=6)
    held.take("pages-1.img", os.urandom(5 * CHUNK_BYTES))
    held.image.give_up()
    with pytest.raises(ImageError, match="was given up"):
        held.image.finish()
    held.image.abort()
    assert held.image.bytes_stored < HEADERS


def test_an_abort_ends_what_is_held():
    """No thread waits for ever."""
    held = Held(room=8, expected=6)
    held.take("pages-1.img", os.urandom(5 * CHUNK_BYTES))
    held.image.abort()
    assert held.image.bytes_stored < HEADERS
