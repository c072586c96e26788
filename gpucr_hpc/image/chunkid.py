"""Keyed ids of chunks: equal plain bytes, equal id; without the key nobody can compute one or make two chunks share it.

Who calls: writer (which chunk was stored before; the id goes into the index) and reader (is what a chunk opens to the
plain text that the agent signed?). The second is why the key is the site's alone: whoever has the data key can
make other bytes with the same GCM tag, but not with the same id.

    plain -> GMAC under k1, fixed nonce -> 16 bytes -> keyed BLAKE2b under k2 -> 16 bytes

The first step is a universal hash (GHASH), at least ten times as fast as SHA-256 or BLAKE2b where the processor
multiplies polynomials; the second hides its output, from which k1's hash key could be solved for. Two chunks of at
most 1 MiB that were chosen without knowing the key share an id with a probability below 2^-111.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

#: Length of an id.
ID_BYTES = 16
_NONCE = bytes(12)


class ChunkIds:
    """Ids under one key of 32 bytes; any thread may call."""

    def __init__(self, key: bytes) -> None:
        parts = HKDF(algorithm=SHA256(), length=64, salt=None, info=b"gpucr-v2 chunk ids").derive(key)
        #: Of the first step.
        self.mark_key = parts[:32]
        self._hash, self._key = AESGCM(self.mark_key), parts[32:]

    def __repr__(self) -> str:
        return "ChunkIds(<secret>)"

    def of(self, plain: bytes | bytearray | memoryview) -> bytes:
        """16 bytes for the plain bytes of a chunk."""
        return self.name(self._hash.encrypt(_NONCE, b"", plain))

    def name(self, mark: bytes) -> bytes:
        """The id of the chunk that the first step made this of."""
        return hashlib.blake2b(mark, key=self._key, digest_size=ID_BYTES).digest()
