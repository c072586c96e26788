"""One chunk: plain bytes to kind, payload and tag, and back.

Who calls: writer and reader, on their worker threads. Everything slow releases the GIL except AES-GCM, which
python3-cryptography does with the GIL held (8 GB/s on one Zen 4 core, so one process seals at most that).

    plain -> all zero? nothing : LZ4 if it pays, else raw -> AES-256-GCM -> payload (same length) and tag
"""

from __future__ import annotations

import struct
from enum import IntEnum

import lz4.block
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Largest plain chunk. 1 MiB is the size of the largest pipe that a process gets without privilege.
CHUNK_BYTES = 1 << 20
#: Length of a GCM tag.
TAG_BYTES = 16
#: LZ4 is tried on this much of a chunk first, so that incompressible data costs one sixteenth of a try.
SAMPLE_BYTES = 64 << 10
#: Images per checkpoint and packs per image fit the nonce; the last pack number means the index.
MAX_IMAGES = 1 << 16
INDEX_PACK = (1 << 16) - 1

ZEROS = bytes(CHUNK_BYTES)

_NONCE = struct.Struct("<HHQ")
_PLACE = struct.Struct("<QIB")


class ChunkKind(IntEnum):
    """How the payload of a chunk holds its plain bytes."""

    ZERO = 0
    RAW = 1
    LZ4 = 2


class Place:
    """Where a chunk belongs; additional data of its seal, so that it opens nowhere else."""

    __slots__ = ("_head", "_tail")

    def __init__(self, checkpoint: str, node_rank: int, stream: str) -> None:
        self._head = b"gpucr-v1 chunk\0" + node_rank.to_bytes(2, "little")
        self._tail = stream.encode() + b"\0" + checkpoint.encode()

    def bind(self, sequence: int, plain_bytes: int, kind: int) -> bytes:
        """The additional data of chunk number `sequence` of the stream."""
        return self._head + _PLACE.pack(sequence, plain_bytes, kind) + self._tail


def nonce(image: int, pack: int, offset: int) -> bytes:
    """12 bytes, unique under the key of an image: no place of a pack is written twice."""
    return _NONCE.pack(image, pack, offset)


def is_zero(buffer: bytearray | memoryview, size: int) -> bool:
    """True when the first `size` bytes are zero. One memcmp (37 GB/s) for a whole chunk."""
    if size and buffer[0]:
        return False
    if size == CHUNK_BYTES and len(buffer) == CHUNK_BYTES and isinstance(buffer, bytearray):
        return buffer == ZEROS
    return bytes(buffer[:size]) == ZEROS[:size]


def squeeze(plain: memoryview) -> bytes | None:
    """The LZ4 block of a chunk, or None where it is not below 7/8 of the size."""
    size = len(plain)
    if size > SAMPLE_BYTES:
        head = lz4.block.compress(plain[:SAMPLE_BYTES], store_size=False)
        if len(head) * 8 >= SAMPLE_BYTES * 7:
            return None
    packed: bytes = lz4.block.compress(plain, store_size=False)
    return packed if len(packed) * 8 < size * 7 else None


def unsqueeze(packed: bytes | bytearray | memoryview, plain_bytes: int) -> bytes:
    """Plain bytes of an LZ4 block. Raises ValueError when it does not give exactly `plain_bytes`."""
    try:
        plain: bytes = lz4.block.decompress(packed, uncompressed_size=plain_bytes)
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from None
    if len(plain) != plain_bytes:
        raise ValueError(f"{len(plain)} bytes instead of {plain_bytes}")
    return plain


def seal(cipher: AESGCM, number: bytes, payload: bytes | memoryview, place: bytes, room: bytearray) -> memoryview:
    """Encrypt into `room` (payload length + 16 bytes at least): ciphertext, then tag.

    Falls back to a fresh buffer below cryptography 47, which has no encrypt_into.
    """
    size = len(payload) + TAG_BYTES
    target = memoryview(room)[:size]
    if hasattr(cipher, "encrypt_into"):
        cipher.encrypt_into(number, payload, place, target)
        return target
    return memoryview(cipher.encrypt(number, payload, place))


def unseal(cipher: AESGCM, number: bytes, sealed: memoryview, place: bytes, room: bytearray) -> memoryview | None:
    """Decrypt ciphertext and tag into `room`; None when they are not what was sealed for this place."""
    size = len(sealed) - TAG_BYTES
    try:
        if hasattr(cipher, "decrypt_into"):
            target = memoryview(room)[:size]
            cipher.decrypt_into(number, sealed, place, target)
            return target
        return memoryview(cipher.decrypt(number, sealed, place))
    except InvalidTag:
        return None
