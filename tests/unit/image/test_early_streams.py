"""Streams whose content is expected to come again: only what did not remains of them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

from image_pair import ID, KEY

from gpucr_hpc.image.base import Base
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import ImageEntry
from gpucr_hpc.store.memory import MemoryStore

PAGE = 4096
SIZE = 24 * CHUNK_BYTES


def written(
    store: MemoryStore,
    early: Mapping[str, bytes],
    content: Mapping[str, bytes],
    *,
    base: Base | None = None,
    name: str = ID,
) -> tuple[ImageEntry, dict[str, int]]:
    """An image, and the sizes of the early streams in it."""
    staging = store.begin("41", ID)
    image = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY)
    for label, data in early.items():
        with image.stream(label, pages=True, early=True) as stream:
            stream.write(data)
    assert image.bytes_plain == 0
    for label, data in content.items():
        with image.stream(label, pages=True) as stream:
            stream.write(data)
    assert image.bytes_plain == sum(map(len, content.values()))
    entry = image.finish()
    staging.publish(b"M")
    with ImageReader(lambda file: store.open("41", ID, file), entry, checkpoint=ID, key=KEY) as reader:
        reader.verify(deep=True)
        assert {label: reader.read(label) for label in content} == dict(content)
        return entry, {label: len(reader.read(label)) for label in reader.names() if label in early}


def test_nothing_is_left_of_what_came_again():
    """Also when it begins elsewhere in the other stream: chunks end where the content says."""
    data = os.urandom(SIZE)
    alone, _ = written(MemoryStore(), {}, {"pages-1.img": data})
    entry, left = written(MemoryStore(), {"early-1.img": data}, {"pages-1.img": data})
    assert left == {}
    assert abs(entry.bytes_stored - alone.bytes_stored) < 1000, "the index is compressed"
    assert entry.bytes_plain == len(data)
    begun = os.urandom(7 * PAGE) + data
    entry, left = written(
        MemoryStore(), {"early-1.img": data[: SIZE // 2], "early-2.img": data[SIZE // 2 :]}, {"p": begun}
    )
    assert sum(left.values()) < SIZE // 4
    assert entry.bytes_stored < alone.bytes_stored * 5 // 4


def test_what_changed_since_remains_and_is_stored_anew():
    """The packs have no gaps, so it belongs to the image."""
    rng, data = random.Random(3), os.urandom(SIZE)
    changed = bytearray(data)
    for _ in range(4):
        at = rng.randrange(SIZE // PAGE) * PAGE
        changed[at : at + PAGE] = os.urandom(PAGE)
    entry, left = written(MemoryStore(), {"early-1.img": data}, {"pages-1.img": bytes(changed)})
    assert 0 < sum(left.values()) <= 8 * CHUNK_BYTES
    assert entry.bytes_plain == len(changed) + sum(left.values())


def test_nothing_in_common():
    data = {"early-1.img": os.urandom(3 * CHUNK_BYTES), "early-2.img": bytes(5 * CHUNK_BYTES)}
    _, left = written(MemoryStore(), data, {"pages-1.img": b"p" * 5000})
    assert left == {"early-1.img": 3 * CHUNK_BYTES}, "what is zero takes no place"


def test_what_an_earlier_image_has_is_referred_to():
    store, data = MemoryStore(), os.urandom(SIZE)
    first, _ = written(store, {}, {"pages-1.img": data})
    with ImageReader(lambda name: store.open("41", ID, name), first, checkpoint=ID, key=KEY) as reader:
        links: dict[str, str] = {}
        staging = store.begin("41", other := "20261127T232502Z-3f9b")
        base = Base(reader, lambda old, new: links.setdefault(new, old), lambda new: links.pop(new))
        staging.abort()
    entry, left = _with_links(store, data, base, links, other)
    assert left == {}
    assert entry.bytes_stored < 100_000


def _with_links(
    store: MemoryStore, data: bytes, base: Base, links: dict[str, str], name: str
) -> tuple[ImageEntry, dict[str, int]]:
    staging = store.begin("41", name)
    image = ImageWriter(staging.create, checkpoint=name, node_rank=0, key=KEY, base=base)
    for label, early in (("early-1.img", True), ("pages-1.img", False)):
        with image.stream(label, pages=True, early=early) as stream:
            stream.write(data)
    entry = image.finish()
    staging.publish(b"M")

    def open_(file: str) -> object:
        return store.open("41", ID, links[file]) if file in links else store.open("41", name, file)

    with ImageReader(open_, entry, checkpoint=name, key=KEY) as reader:  # type: ignore[arg-type]
        assert reader.read("pages-1.img") == data
        return entry, {label: 1 for label in reader.names() if label.startswith("early")}
