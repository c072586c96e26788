"""One chunk: plain bytes to kind, payload and tag, and back.

Who calls: writer and reader, on their worker threads. Everything slow is done in buffers that are used again and
releases the GIL (AES-GCM: with cryptography 47 or newer).

    plain -> all zero? nothing : stored before? a reference : LZ4 if it pays, else raw -> AES-256-GCM -> payload, tag
"""

from __future__ import annotations

import struct
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpucr_hpc.image import native
from gpucr_hpc.image.buffers import Buffer, compress, equal

#: Largest plain chunk. 1 MiB is the size of the largest pipe that a process gets without privilege.
CHUNK_BYTES = 1 << 20
#: Length of a GCM tag.
TAG_BYTES = native.TAG_BYTES
#: Length of an image key.
KEY_BYTES = 32
#: LZ4 is tried on this much for each quarter of a MiB of a chunk first, at two places at least: incompressible data
#: costs a part of a try.
SAMPLE_BYTES = 16 << 10
_SAMPLED_BYTES = 256 << 10
#: Images per checkpoint and packs per image fit the nonce; the last pack number means the index.
MAX_IMAGES = 1 << 16
INDEX_PACK = (1 << 16) - 1

ZEROS = Buffer(CHUNK_BYTES)

_NONCE = struct.Struct("<HHQ")
_PLACE = struct.Struct("<HHQIB")


class ChunkKind(IntEnum):
    """How the payload of a chunk holds its plain bytes."""

    ZERO = 0
    RAW = 1
    LZ4 = 2


class Origin:
    """The image in which chunks are sealed: its key and what binds a chunk to its place."""

    __slots__ = ("_head", "_key", "_rank", "_tail", "cipher")

    def __init__(self, key: bytes, checkpoint: str, node_rank: int) -> None:
        self.cipher = AESGCM(key)
        self._key, self._rank = key, node_rank
        self._head, self._tail = b"gpucr-v2 chunk\0", checkpoint.encode()

    def nonce(self, pack: int, offset: int) -> bytes:
        """12 bytes, unique under the key of an image: no place of a pack is written twice."""
        return nonce(self._rank, pack, offset)

    def place(self, pack: int, offset: int, plain_bytes: int, kind: int) -> bytes:
        """The additional data of the chunk at this place, so that it opens nowhere else."""
        return self._head + _PLACE.pack(self._rank, pack, offset, plain_bytes, kind) + self._tail

    def native_place(self, pack: int, offset: int) -> bytes:
        """Key, nonce and place of chunks from here on, as the C functions want them."""
        return native.place(self._key, offset, self._rank, pack, self._tail)


def nonce(node_rank: int, pack: int, offset: int) -> bytes:
    """12 bytes, unique under the key of an image."""
    return _NONCE.pack(node_rank, pack, offset)


def is_zero(buffer: Buffer, at: int, size: int) -> bool:
    """True when `size` bytes from `at` on are zero."""
    return not size or (not buffer.view[at] and equal(buffer, at, ZEROS, size))


def squeeze(plain: Buffer, at: int, size: int, room: Buffer) -> int:
    """Put the LZ4 block of a chunk into `room`; its length, or 0 where it is not below 7/8 of the size.

    A few samples decide whether it is tried at all.
    """
    if size >= 8 * SAMPLE_BYTES:
        count = max(2, -(-size // _SAMPLED_BYTES))
        step = (size - SAMPLE_BYTES) // (count - 1)
        sizes = [compress(plain, at + number * step, SAMPLE_BYTES, room, SAMPLE_BYTES) for number in range(count)]
        if sum(found or SAMPLE_BYTES for found in sizes) * 8 >= count * SAMPLE_BYTES * 7:
            return 0
    return compress(plain, at, size, room, (size * 7 - 1) // 8) if size > 1 else 0


def seal(cipher: AESGCM, number: bytes, payload: memoryview, place: bytes, room: Buffer) -> memoryview:
    """Encrypt into `room` (payload length + 16 bytes at least): ciphertext, then tag.

    Falls back to fresh memory below cryptography 47, which has no encrypt_into.
    """
    if hasattr(cipher, "encrypt_into"):
        target = room.view[: len(payload) + TAG_BYTES]
        cipher.encrypt_into(number, payload, place, target)
        return target
    return memoryview(cipher.encrypt(number, payload, place))


def unseal(cipher: AESGCM, number: bytes, sealed: memoryview, place: bytes, room: Buffer) -> bool:
    """Decrypt ciphertext and tag into the start of `room`; False when they are not what was sealed for this place."""
    size = len(sealed) - TAG_BYTES
    try:
        if hasattr(cipher, "decrypt_into"):
            cipher.decrypt_into(number, sealed, place, room.view[:size])
        else:
            room.view[:size] = cipher.decrypt(number, sealed, place)
    except InvalidTag:
        return False
    return True
