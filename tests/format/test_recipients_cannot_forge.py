"""A recipient has the data key of a checkpoint, and with his own store also its files: what he can do and what not.

GCM's tag is no commitment: whoever knows the key finds other bytes with the same tag. The first test does it, so that
the others mean something.
"""

from __future__ import annotations

import copy
import os

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from image_samples import CHECKPOINT, SITE, Checkpoint

from gpucr_hpc.errors import IntegrityError, WrongKey
from gpucr_hpc.image.chunks import ChunkKind
from gpucr_hpc.image.keys import DataKey, SiteKey
from gpucr_hpc.image.layout import Chunk
from gpucr_hpc.image.recipients import Opener, new_key_pair, parse

EVIL = b"root shell, please"
_R = 0xE1 << 120


def gf_multiply(x: int, y: int) -> int:
    """Product in GF(2^128) as GCM has it: the first bit of a block is the highest."""
    z = 0
    for bit in range(127, -1, -1):
        if y >> bit & 1:
            z ^= x
        x = x >> 1 ^ _R if x & 1 else x >> 1
    return z


def gf_power(x: int, exponent: int) -> int:
    result = 1 << 127
    while exponent:
        if exponent & 1:
            result = gf_multiply(result, x)
        x, exponent = gf_multiply(x, x), exponent >> 1
    return result


def ghash(h: int, blocks: list[int]) -> int:
    total = 0
    for block in blocks:
        total = gf_multiply(total ^ block, h)
    return total


def blocks_of(data: bytes) -> list[int]:
    padded = data + bytes(-len(data) % 16)
    return [int.from_bytes(padded[at : at + 16]) for at in range(0, len(padded), 16)]


def same_tag(key: bytes, place: bytes, old: bytes, new: bytes) -> bytes:
    """`new`, of the length of `old`, with its last whole block changed so that both have one tag under the key."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    h = int.from_bytes(encryptor.update(bytes(16)))
    lengths = [len(place) * 8 << 64 | len(old) * 8]
    head, free = blocks_of(place), len(new) // 16 - 1
    difference = ghash(h, head + blocks_of(old) + lengths) ^ ghash(h, head + blocks_of(new) + lengths)
    behind = len(blocks_of(new)) + 1 - free
    change = gf_multiply(difference, gf_power(gf_power(h, behind), (1 << 128) - 2))
    at = free * 16
    block = int.from_bytes(new[at : at + 16]) ^ change
    return new[:at] + block.to_bytes(16) + new[at + 16 :]


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint({"pages-1.img": os.urandom(2000), "text.img": b"text " * 100}, DataKey.generate(), packs=1)


def forged(checkpoint: Checkpoint, key: DataKey) -> Checkpoint:
    """The checkpoint with another beginning of pages-1.img, made with the data key alone; only its pack is another."""
    with checkpoint.reader(key=key) as reader:
        chunk: Chunk = reader.index.streams["pages-1.img"].chunk(0)
        origin = reader._origins[0][0]
        place = origin.place(chunk.pack, chunk.offset, chunk.plain, chunk.kind)
        nonce = origin.nonce(chunk.pack, chunk.offset)
        raw = reader.key
    assert ChunkKind.RAW == chunk.kind
    name = checkpoint.entry.packs[0].name
    data = checkpoint.files[name]
    old = data[chunk.offset : chunk.offset + chunk.stored]
    stream = Cipher(algorithms.AES(raw), modes.CTR(nonce + b"\0\0\0\2")).encryptor().update(bytes(len(old)))
    new = bytes(a ^ b for a, b in zip(EVIL, stream, strict=False)) + old[len(EVIL) :]
    other = copy.copy(checkpoint)
    other.files = checkpoint.files | {
        name: data[: chunk.offset] + same_tag(raw, place, old, new) + data[chunk.offset + chunk.stored :]
    }
    return other


@pytest.fixture
def opened(checkpoint) -> DataKey:
    """The data key as a recipient gets it out of his slot."""
    private, public = new_key_pair()
    slot = parse(public, "f")[0].wrap(checkpoint.key, CHECKPOINT)
    return Opener(private, "k").unwrap([checkpoint.key.wrap(SITE, CHECKPOINT), slot], CHECKPOINT)


def test_recipient_reads_everything(checkpoint, opened):
    """That is what he is for."""
    assert checkpoint.content == checkpoint.read_all(key=opened)


def test_recipient_can_forge_a_tag(checkpoint, opened):
    """With the data key alone nothing is noticed: index, digests, tags are all as the manifest says."""
    found = forged(checkpoint, opened).read_all(key=opened)["pages-1.img"]
    assert found.startswith(EVIL)
    assert len(checkpoint.content["pages-1.img"]) == len(found)


def test_what_a_recipient_forged_is_refused_by_the_site(checkpoint, opened):
    """The id of the chunk is under a key that he has not; the error names pack and place."""
    with pytest.raises(IntegrityError, match=r"r0000-p00\.pack.*chunk 0 of stream pages-1.img, at byte \d+, was exch"):
        forged(checkpoint, opened).read_all()


def test_recipients_key_cannot_restore(opened):
    """A key without the id key is known as one; the worker refuses to serve a restore with it."""
    assert not opened.may_restore


def test_recipient_cannot_get_the_id_key(checkpoint, opened):
    """It is in no slot but the site's, and in no file."""
    ids = checkpoint.key._ids
    private, public = new_key_pair()
    slot = parse(public, "f")[0].wrap(checkpoint.key, CHECKPOINT)
    with checkpoint.reader(key=opened) as reader:
        index = repr(reader.index).encode()
    for place in (index, *checkpoint.files.values(), repr(slot).encode(), opened.reveal_hex().encode()):
        assert ids not in place
        assert ids.hex().encode() not in place
    with pytest.raises(WrongKey):
        Opener(private, "k").unwrap([checkpoint.key.wrap(SITE, CHECKPOINT)], CHECKPOINT)


def test_old_site_key_does_not_open_what_was_sealed_for_the_new_one(checkpoint):
    """After a rotation; and its id key is another, so nothing new refers to chunks that its holder could exchange."""
    old = SiteKey(b"o" * 32)
    with pytest.raises(WrongKey, match=old.key_id):
        DataKey.unwrap([checkpoint.key.wrap(SITE, CHECKPOINT)], [old], CHECKPOINT)
    assert old.id_key("41") != SITE.id_key("41")
