"""CRIU's image files: protobuf messages, each behind its length."""

from __future__ import annotations

import struct
from collections.abc import Mapping

PAGE = 4096


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(fields: Mapping[int, int | bytes | list[bytes]]) -> bytes:
    """A protobuf message."""
    out = b""
    for number, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bytes):
                out += varint(number << 3 | 2) + varint(len(one)) + one
            else:
                out += varint(number << 3) + varint(one)
    return out


def image(*messages: bytes) -> bytes:
    """An image file."""
    return b"12345678" + b"".join(struct.pack("<I", len(m)) + m for m in messages)


def pagemap(pages_id: int, runs: list[tuple[int, int]]) -> bytes:
    """A pagemap as CRIU 4.2 writes it: runs of (address, pages), all present."""
    return image(message({1: pages_id}), *(message({1: at, 4: 4, 5: pages}) for at, pages in runs))
