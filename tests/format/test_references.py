"""References to chunks of earlier checkpoints: what is stored, what outlives what, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import os
import random

import pytest

from gpucr_hpc.errors import IntegrityError, ObjectMissing, StoreError, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.base import Base
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import ImageEntry
from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore

JOB, ID_KEY = "41", b"i" * 32
IDS = [f"20261127T23250{n}Z-3f9a" for n in range(9)]


class Chain:
    """Checkpoints of one job, each written against the one before."""

    def __init__(self, store) -> None:
        self.store = store
        self.taken: dict[str, tuple[ImageEntry, DataKey]] = {}

    def write(
        self, number: int, content: dict[str, bytes], *, base: int | None = None, ids: bytes = ID_KEY
    ) -> ImageEntry:
        key, checkpoint = DataKey.generate(ids), IDS[number]
        staging = self.store.begin(JOB, checkpoint)
        found = None
        if base is not None:
            with self.read(base) as earlier:
                found = Base(earlier, functools.partial(staging.link, IDS[base]), staging.remove)
        writer = ImageWriter(staging.create, checkpoint=checkpoint, node_rank=0, key=key, base=found)
        for name, data in content.items():
            with writer.stream(name) as stream:
                stream.write(data)
        entry = writer.finish()
        staging.publish(b"M")
        self.taken[checkpoint] = (entry, key)
        return entry

    def read(self, number: int, **changes) -> ImageReader:
        entry, key = self.taken[IDS[number]]
        values = {"entry": entry, "key": key, "checkpoint": IDS[number], **changes}
        return ImageReader(lambda name: self.store.open(JOB, IDS[number], name), values.pop("entry"), **values)

    def content(self, number: int, **changes) -> dict[str, bytes]:
        with self.read(number, **changes) as reader:
            reader.verify(deep=True)
            return {name: reader.read(name) for name in reader.names()}


@pytest.fixture(params=["posix", "memory"])
def chain(request, tmp_path) -> Chain:
    return Chain(PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore())


def memory(seed: int, mib: int = 6) -> dict[str, bytes]:
    rng = random.Random(seed)
    text = b"all work and no play %d\n" % seed * 40000
    return {"pages-1.img": rng.randbytes(mib << 20), "text.img": text, "zero.img": bytes(CHUNK_BYTES)}


def test_an_unchanged_image_stores_only_its_index(chain):
    """Everything is referred to; one changed megabyte costs one megabyte."""
    first = memory(1)
    assert [] == chain.write(0, first).sources
    same = chain.write(1, first, base=0)
    assert same.bytes_stored < 20_000
    assert [IDS[0]] == [source.checkpoint for source in same.sources]
    assert 1 == same.depth
    changed = bytearray(first["pages-1.img"])
    changed[3 << 20] ^= 1
    third = first | {"pages-1.img": bytes(changed)}
    entry = chain.write(2, third, base=1)
    assert CHUNK_BYTES < entry.bytes_stored < CHUNK_BYTES + 20_000
    assert 2 == entry.depth
    assert [first, first, third] == [chain.content(n) for n in range(3)]


def test_deleting_an_earlier_checkpoint_breaks_nothing(chain):
    """Chains of references live on in any order of deletion."""
    first, second = memory(1), memory(1) | {"pages-2.img": os.urandom(3 << 20)}
    third = second | {"pages-3.img": os.urandom(1 << 20)}
    chain.write(0, first)
    chain.write(1, second, base=0)
    entry = chain.write(2, third, base=1)
    assert [IDS[1], IDS[0]] == [source.checkpoint for source in entry.sources]
    chain.store.delete(JOB, IDS[0])
    assert second == chain.content(1)
    chain.store.delete(JOB, IDS[1])
    assert third == chain.content(2)


def test_packs_that_are_not_referred_to_are_not_kept(chain):
    """When nothing is left of an earlier image no link to it is left either, and the image stands for itself."""
    chain.write(0, memory(1))
    entry = chain.write(1, {"pages-1.img": os.urandom(2 << 20)}, base=0)
    assert [] == entry.sources
    assert 0 == entry.depth
    with pytest.raises(ObjectMissing):
        chain.store.open(JOB, IDS[1], layout.linked_name(IDS[0], 0, 0))


def test_equal_chunks_of_one_image_are_stored_once(chain):
    """Forked processes that share memory cost it once; every byte comes back."""
    part = os.urandom(CHUNK_BYTES)
    content = {f"pages-{n}.img": part * 3 for n in range(4)}
    entry = chain.write(0, content)
    assert entry.bytes_stored < 4 * CHUNK_BYTES  # workers may meet the same chunk at once
    assert content == chain.content(0)


def test_a_reference_needs_its_key_and_its_place(chain):
    """A linked pack of another checkpoint, rank or salt, cut, or gone, is refused by name."""
    first = memory(1)
    chain.write(0, first)
    chain.write(1, memory(2))
    entry = chain.write(2, first | {"more.img": os.urandom(9)}, base=0)
    (source,) = entry.sources
    for change in (
        {"checkpoint": IDS[1]},
        {"node_rank": 1},
        {"salt": "00" * 32},
    ):
        bad = dataclasses.replace(entry, sources=[dataclasses.replace(source, **change)])
        with pytest.raises(IntegrityError, match=r"r0000-p0.\.pack"):
            chain.content(2, entry=bad)
    with pytest.raises(IntegrityError, match="sources"):
        chain.content(2, entry=dataclasses.replace(entry, sources=[]))
    short = dataclasses.replace(source.packs[0], size_bytes=100)
    with pytest.raises(IntegrityError, match="100"):
        chain.content(2, entry=dataclasses.replace(entry, sources=[dataclasses.replace(source, packs=[short])]))


def test_damage_in_a_linked_pack_is_found(tmp_path):
    """Every bit of a chunk that is referred to counts, in whichever checkpoint it was written."""
    chain = Chain(PosixStore(tmp_path))
    first = memory(1)
    chain.write(0, first)
    chain.write(1, first, base=0)
    name = layout.linked_name(IDS[0], 0, 0)
    path = tmp_path / JOB / IDS[1] / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        chain.content(1)


def test_a_store_without_links_is_said_at_once(chain):
    """Where links cannot be made Base raises before anything is written, and leaves no link behind."""
    chain.write(0, memory(1))
    made: list[str] = []

    def refuse(name: str, new: str) -> None:
        if name == layout.pack_name(0, 1):
            raise StoreError(path="x", reason="Operation not permitted")
        made.append(new)

    with chain.read(0) as earlier, pytest.raises(StoreError):
        Base(earlier, refuse, made.remove)
    assert [] == made


def test_an_old_image_cannot_be_referred_to(chain):
    """Version 1 has no ids."""
    entry = chain.write(0, memory(1))
    with chain.read(0) as earlier:
        earlier.entry = dataclasses.replace(entry, format=1)
        with pytest.raises(UsageError, match="older format"):
            Base(earlier, lambda *_: None, lambda *_: None)


def test_another_id_key_is_another_chain(chain):
    """After the site key was exchanged nothing is taken for equal; nor can one write without an id key."""
    chain.write(0, memory(1))
    with pytest.raises(UsageError, match="id key"):
        chain.write(1, memory(1), base=0, ids=b"o" * 32)
    with pytest.raises(UsageError, match="id key"):
        ImageWriter(MemoryStore().begin(JOB, IDS[2]).create, checkpoint=IDS[2], node_rank=0, key=DataKey(b"k" * 32))


def test_chunk_exchanged_by_a_holder_of_the_data_key(tmp_path):
    """Other bytes with the same tag can be made with the data key; the id shows it to whoever has the site's key."""
    chain = Chain(PosixStore(tmp_path))
    chain.write(0, {"a": bytes(range(40))})
    entry, _ = chain.taken[IDS[0]]
    with chain.read(0) as reader:
        chunk = reader.index.streams["a"].chunk(0)
        origin = reader._origins[0][0]
        place = origin.place(chunk.pack, chunk.offset, chunk.plain, chunk.kind)
        forged = origin.cipher.encrypt(origin.nonce(chunk.pack, chunk.offset), b"y" * 40, place)
        reader.index.streams["a"].records = layout.RECORD.pack(
            *dataclasses.astuple(dataclasses.replace(chunk, tag=forged[-16:]))
        )
        path = tmp_path / JOB / IDS[0] / entry.packs[chunk.pack].name
        data = bytearray(path.read_bytes())
        data[chunk.offset : chunk.offset + chunk.stored] = forged[:-16]
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="exchanged"):
            reader.read("a")
