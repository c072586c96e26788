"""Keyed ids of chunks."""

from __future__ import annotations

import os

from gpucr_hpc.image.chunkid import ID_BYTES, ChunkIds


def test_same_bytes_same_id():
    """An id depends on the bytes alone, whatever buffer holds them."""
    ids, data = ChunkIds(b"k" * 32), os.urandom(1 << 20)
    assert ID_BYTES == len(ids.of(data))
    forms = (data, bytearray(data), memoryview(bytearray(data)))
    assert {ChunkIds(b"k" * 32).of(data)} == {ids.of(form) for form in forms}


def test_anything_else_another_id():
    """One bit, one byte more, another key: another id."""
    data = bytearray(os.urandom(5000))
    seen = {ChunkIds(b"k" * 32).of(data), ChunkIds(b"o" * 32).of(data)}
    ids = ChunkIds(b"k" * 32)
    for at in (0, 1, 15, 16, 4095, 4999):
        data[at] ^= 1
        seen.add(ids.of(data))
        data[at] ^= 1
    seen |= {ids.of(data + b"\0"), ids.of(data[:-1]), ids.of(b""), ids.of(bytes(1)), ids.of(bytes(16))}
    assert 2 + 6 + 5 == len(seen)


def test_linear_hash_is_hidden():
    """The XOR of ids says nothing: GHASH alone would give id(a) ^ id(b) == id(a ^ c) ^ id(b ^ c)."""
    ids = ChunkIds(b"k" * 32)
    a, b, c = (os.urandom(64) for _ in range(3))
    xor = lambda x, y: bytes(p ^ q for p, q in zip(x, y, strict=True))  # noqa: E731
    assert xor(ids.of(a), ids.of(b)) != xor(ids.of(xor(a, c)), ids.of(xor(b, c)))
