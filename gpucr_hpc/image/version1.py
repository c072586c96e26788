"""What is different in checkpoints of format version 1; only read, never written any more.

Who calls: reader. Records have no source and no id, and a chunk's seal binds its stream and number instead of its
place in the pack (which the nonce has in both versions).
"""

from __future__ import annotations

import struct

from gpucr_hpc.image import layout
from gpucr_hpc.image.chunkid import ID_BYTES

#: One chunk: offset, stored length, plain length, pack, kind, zero, tag.
RECORD = struct.Struct("<QIIHBx16s")
_PLACE = struct.Struct("<QIB")
_NO_ID = bytes(ID_BYTES)


def decode_index(data: bytes, path: str) -> layout.Index:
    """An index as if it were of the present version. Raises IntegrityError for anything out of shape."""
    streams = layout.decode_streams(data, 0, RECORD.size, path)
    for stream in streams.values():
        stream.records = b"".join(
            layout.RECORD.pack(offset, stored, plain, pack, 0, kind, tag, _NO_ID)
            for offset, stored, plain, pack, kind, tag in RECORD.iter_unpack(stream.records)
        )
    return layout.Index([], streams)


def place(checkpoint: str, node_rank: int, stream: str, sequence: int, plain_bytes: int, kind: int) -> bytes:
    """The additional data of chunk number `sequence` of a stream."""
    head = b"gpucr-v1 chunk\0" + node_rank.to_bytes(2, "little")
    return head + _PLACE.pack(sequence, plain_bytes, kind) + stream.encode() + b"\0" + checkpoint.encode()
