"""Attacks on packs and index; each is found before a wrong byte leaves the reader."""

from __future__ import annotations

import copy
import dataclasses
import os
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_samples import CHECKPOINT, OTHER, Checkpoint, contents

from gpucr_hpc.errors import FormatUnknown, IntegrityError, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.chunks import CHUNK_BYTES, Origin
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.model import PackEntry

PACK0, PACK1, INDEX = "r0000-p00.pack", "r0000-p01.pack", "r0000.index"


def damaged(good: Checkpoint) -> Checkpoint:
    other = copy.copy(good)
    other.files = dict(good.files)
    return other


def refused(checkpoint: Checkpoint, name: str, **changes: object) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught:
        checkpoint.read_all(**changes)
    assert name in str(caught.value)
    return caught.value


def test_everything_reads_back(good):
    """Each stream comes back as it was written, with its size, in the order of writing."""
    assert contents() == good.read_all()
    with good.reader() as reader:
        assert list(contents()) == reader.names()
        assert reader.size("zero.img") == CHUNK_BYTES + 5
        reader.verify(deep=True)


@pytest.mark.parametrize("name", [PACK0, PACK1, INDEX])
def test_missing_file_is_named(good, name):
    """A missing pack or index is an IntegrityError that names it, at open."""
    bad = damaged(good)
    del bad.files[name]
    assert "missing" in str(refused(bad, name))


@pytest.mark.parametrize("name", [PACK0, PACK1, INDEX])
def test_truncation_at_any_boundary(good, name):
    """A file cut at any sampled place is refused by its size when the image is opened."""
    size = len(good.files[name])
    cuts = {0, 1, 7, 8, 10, 63, 64, 65, 71, 72, 73, size // 2, size - 17, size - 16, size - 1}
    for cut in sorted(c for c in cuts if c < size):
        bad = damaged(good)
        bad.files[name] = good.files[name][:cut]
        with pytest.raises(IntegrityError, match=name):
            bad.reader()


@pytest.mark.parametrize("name", [PACK0, PACK1, INDEX])
def test_appended_bytes(good, name):
    """A longer file is refused too."""
    bad = damaged(good)
    bad.files[name] += b"\0"
    refused(bad, name)


@pytest.mark.parametrize("name", [PACK0, PACK1])
def test_truncation_with_a_manifest_that_agrees(good, name):
    """Even when size and manifest agree, the index knows how long a pack must be."""
    bad = damaged(good)
    size = len(good.files[name]) - 100
    bad.files[name] = good.files[name][:size]
    refused(bad, INDEX, entry=good.resized(name, size))


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.sampled_from([PACK0, PACK1, INDEX]))
@settings(max_examples=60)
def test_bit_flip_anywhere(small, where, bit, which):
    """One bit changed anywhere in any file is found."""
    data = bytearray(small.files[which])
    data[int(where * len(data))] ^= 1 << bit
    bad = damaged(small)
    bad.files[which] = bytes(data)
    with pytest.raises((IntegrityError, FormatUnknown)) as caught:
        bad.read_all()
    assert which in str(caught.value)


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return Checkpoint({"a": b"a" * 700, "b": os.urandom(300), "c": bytes(9)}, DataKey(b"k" * 32, b"i" * 32))


def test_chunk_swap(make):
    """Two chunks of one size exchanged in a pack are both refused."""
    checkpoint = make({"raw": os.urandom(2 * CHUNK_BYTES)}, packs=1)
    data, h = checkpoint.files[PACK0], layout.HEADER_BYTES
    one, two = data[h : h + CHUNK_BYTES], data[h + CHUNK_BYTES :]
    checkpoint.files[PACK0] = data[:h] + two + one
    refused(checkpoint, PACK0)


def rewrite_index(checkpoint: Checkpoint, change: object, key: DataKey | None = None) -> None:
    """Seal a changed index with the real key, as one who has data key and signing key would."""
    import hashlib
    import zlib

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from gpucr_hpc.image.chunks import INDEX_PACK, nonce

    entry = checkpoint.entry
    data = checkpoint.files[INDEX]
    start = layout.HEADER_BYTES + 8
    cipher = AESGCM(checkpoint.key.image_key(CHECKPOINT, 0, bytes.fromhex(entry.salt)))
    plain = zlib.decompress(cipher.decrypt(nonce(0, INDEX_PACK, 0), data[start:], layout.index_place(data[:start])))
    index = layout.decode_index(plain, INDEX)
    table = {n: (s.size_bytes, s.records) for n, s in change(index.streams).items()}
    changed = layout.encode_index(index.keys, table)
    head = data[: layout.HEADER_BYTES] + struct.pack("<Q", len(changed))
    sealed = cipher.encrypt(nonce(0, INDEX_PACK, 0), zlib.compress(changed), layout.index_place(head))
    checkpoint.files[INDEX] = head + sealed
    index = PackEntry(INDEX, len(head + sealed), hashlib.sha256(head + sealed).hexdigest())
    checkpoint.entry = dataclasses.replace(entry, index=index)


def test_reordered_chunks_in_a_resealed_index(make):
    """The order of chunks is the index's alone; without the signing key an index sealed anew is not the manifest's."""
    checkpoint = make({"a": os.urandom(2 * CHUNK_BYTES)}, packs=1)
    signed = checkpoint.entry
    r = layout.RECORD.size
    rewrite_index(
        checkpoint,
        lambda s: {"a": dataclasses.replace(s["a"], records=s["a"].records[r:] + s["a"].records[:r])},
    )
    resized = dataclasses.replace(signed.index, size_bytes=len(checkpoint.files[INDEX]))
    refused(checkpoint, INDEX, entry=dataclasses.replace(signed, index=resized))


@pytest.mark.parametrize("change", ["offset", "pack", "plain", "kind", "tag"])
def test_record_that_names_another_place(make, change):
    """A record that is changed in any part opens nothing, even in an index sealed and signed anew."""
    checkpoint = make({"a": os.urandom(700), "b": os.urandom(700)}, packs=2)

    def other(streams):
        a, b = (streams[name].chunk(0) for name in "ab")
        changes = {
            "offset": {"offset": a.offset + 1},
            "pack": {"pack": 1 - a.pack},
            "plain": {"plain": 701, "kind": 2},
            "kind": {"kind": 2, "stored": 699},
            "tag": {"tag": b.tag},
        }[change]
        record = layout.RECORD.pack(*dataclasses.astuple(dataclasses.replace(a, **changes)))
        return streams | {"a": dataclasses.replace(streams["a"], records=record)}

    rewrite_index(checkpoint, other)
    with pytest.raises(IntegrityError):
        checkpoint.read_all()


@pytest.mark.parametrize("drop", ["a", "b"])
def test_dropped_stream_even_with_a_resealed_index(make, drop):
    """A stream cannot be left out: its bytes would be a gap in the pack."""
    checkpoint = make({"a": os.urandom(500), "b": os.urandom(500)}, packs=1)
    rewrite_index(checkpoint, lambda s: {n: x for n, x in s.items() if n != drop})
    refused(checkpoint, INDEX)


def test_dropped_zero_stream_is_missed(make):
    """A stream without stored bytes cannot be left out either: the manifest counts."""
    checkpoint = make({"a": os.urandom(500), "z": bytes(500)}, packs=1)
    rewrite_index(checkpoint, lambda s: {"a": s["a"]})
    refused(checkpoint, INDEX)


def test_index_of_another_write_with_the_same_key(make):
    """Two images of one checkpoint and rank have different salts, so nothing of one fits the other."""
    one, two = make(), make()
    assert one.entry.salt != two.entry.salt
    for name in (PACK0, INDEX):
        bad = damaged(one)
        bad.files[name] = two.files[name]
        refused(bad, name)


def test_pack_swap_in_one_image(make):
    """Two packs exchanged under each other's name are refused by their header."""
    checkpoint = make({"a": os.urandom(CHUNK_BYTES), "b": os.urandom(CHUNK_BYTES)})
    files = checkpoint.files
    assert len(files[PACK0]) == len(files[PACK1])
    files[PACK0], files[PACK1] = files[PACK1], files[PACK0]
    with pytest.raises(IntegrityError, match=f"{PACK0}.*another checkpoint, image or pack"):
        checkpoint.reader()


def test_pack_swap_between_checkpoints(make):
    """A pack of equal size from another checkpoint with the same data key is refused at open."""
    content = {"a": os.urandom(CHUNK_BYTES)}
    mine, other = make(content, packs=1), make(content, packs=1, checkpoint=OTHER)
    mine.files[PACK0] = other.files[PACK0]
    with pytest.raises(IntegrityError, match=PACK0):
        mine.reader()


def test_pack_with_a_forged_header(make):
    """The right header before the body of another checkpoint does not help."""
    content = {"a": os.urandom(CHUNK_BYTES)}
    mine, other = make(content, packs=1), make(content, packs=1, checkpoint=OTHER)
    h = layout.HEADER_BYTES
    mine.files[PACK0] = mine.files[PACK0][:h] + other.files[PACK0][h:]
    refused(mine, PACK0)


def test_image_swap_between_checkpoints(make):
    """A whole image does not open as that of another checkpoint."""
    checkpoint = make()
    with pytest.raises(IntegrityError, match=INDEX):
        checkpoint.reader(checkpoint=OTHER)


def test_image_swap_between_node_ranks(make):
    """A whole image does not open as that of another node rank."""
    checkpoint = make()
    refused(checkpoint, INDEX, entry=dataclasses.replace(checkpoint.entry, node_rank=1))


def test_wrong_data_key(good):
    """Another data key opens nothing."""
    refused(good, INDEX, key=DataKey(b"x" * 32, b"i" * 32))


@pytest.mark.parametrize("name", [PACK0, INDEX])
def test_unknown_version_is_named(good, name):
    """A file of a later version is refused with its number, before its content is looked at."""
    bad = damaged(good)
    data = bytearray(bad.files[name])
    data[8:10] = struct.pack("<H", 7)
    bad.files[name] = bytes(data)
    with pytest.raises(FormatUnknown, match=f"{name}: format version 7 is not known"):
        bad.reader()


def test_damage_is_found_before_a_byte_leaves(make, tmp_path):
    """copy_to_fd writes the good chunks before the bad one and nothing of the bad one."""
    checkpoint = make({"raw": os.urandom(3 * CHUNK_BYTES)}, packs=1)
    data = bytearray(checkpoint.files[PACK0])
    data[layout.HEADER_BYTES + CHUNK_BYTES + 5] ^= 1
    records = []
    checkpoint.files[PACK0] = bytes(data)
    with checkpoint.reader() as reader, (tmp_path / "out").open("wb") as out:
        stream = reader.index.streams["raw"]
        records = [stream.chunk(n).offset for n in range(3)]
        with pytest.raises(IntegrityError):
            reader.copy_to_fd("raw", out.fileno())
    bad = records.index(layout.HEADER_BYTES + CHUNK_BYTES)
    assert bad * CHUNK_BYTES == (tmp_path / "out").stat().st_size
    assert checkpoint.content["raw"][: bad * CHUNK_BYTES] == (tmp_path / "out").read_bytes()


def test_open_is_quick_and_reads_no_chunk(make):
    """A truncated set is refused without reading its packs."""
    checkpoint = make({"raw": os.urandom(8 * CHUNK_BYTES)})
    del checkpoint.files[PACK1]
    start = time.monotonic()
    refused(checkpoint, PACK1)
    assert time.monotonic() - start < 1


def test_no_plain_byte_is_stored(make):
    """No part of a marker, and no stream name, is in any file, compressed or raw."""
    marker = b"THE-SECRET-MARKER-OF-THIS-TEST"
    content = {
        "private-name.img": marker * 40000,
        "raw.img": b"".join(os.urandom(40) + marker for _ in range(20000)),
        "small.img": marker,
    }
    checkpoint = make(content)
    for name, data in checkpoint.files.items():
        assert name.encode() not in data
        for part in (marker, marker[:9], marker[-9:], b"private-name"):
            assert part not in data
    assert content == checkpoint.read_all()


def test_two_writes_have_nothing_in_common(make):
    """The same content under the same key is stored as different bytes."""
    one, two = make({"a": b"x" * 100}, packs=1), make({"a": b"x" * 100}, packs=1)
    h = layout.HEADER_BYTES
    assert one.files[PACK0][h:] != two.files[PACK0][h:]


@given(data=st.binary(max_size=400))
@settings(max_examples=200)
def test_index_decoder_takes_anything(data):
    """Arbitrary bytes give streams or IntegrityError, nothing else."""
    for start in (b"", bytes(4)):
        try:
            index = layout.decode_index(start + data, INDEX)
            layout.check_geometry(index.streams, [100, 200], [{0: 100}], INDEX)
        except IntegrityError:
            pass


def test_index_bomb_is_refused(good):
    """An index that expands to more than it claims is stopped at what it claims."""
    import zlib

    with pytest.raises(IntegrityError, match="not what it claims"):
        layout.inflate(memoryview(zlib.compress(bytes(10 << 20))), 100, INDEX)
    with pytest.raises(IntegrityError, match="claims"):
        layout.inflate(memoryview(b""), 1 << 40, INDEX)


def test_unknown_stream_is_a_usage_error(good):
    """Asking for a stream that is not there says so."""
    with good.reader() as reader, pytest.raises(UsageError, match="no stream 'x'"):
        reader.read("x")


def test_places_differ_in_every_part():
    """Checkpoint, rank, pack, offset, length and kind all change the additional data."""
    key = bytes(32)
    base = Origin(key, CHECKPOINT, 0).place(0, 64, 1, 1)
    others = [
        Origin(key, OTHER, 0).place(0, 64, 1, 1),
        Origin(key, CHECKPOINT, 1).place(0, 64, 1, 1),
        Origin(key, CHECKPOINT, 0).place(1, 64, 1, 1),
        Origin(key, CHECKPOINT, 0).place(0, 65, 1, 1),
        Origin(key, CHECKPOINT, 0).place(0, 64, 2, 1),
        Origin(key, CHECKPOINT, 0).place(0, 64, 1, 2),
    ]
    assert len({base, *others}) == 7
