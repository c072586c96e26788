"""Files of a CRIU image as far as `gpucr inspect` reads them."""

from __future__ import annotations

import json
import struct

PAGE = 4096
HEAP, STACK, FILE, SHARED = 0x10000000, 0x7FF000000000, 0x20000000, 0x30000000
MAPS = f"""{HEAP:x}-{HEAP + 0x800000:x} rw-p 00000000 00:00 0                  [heap]
{FILE:x}-{FILE + 0x2000:x} r--p 00000000 08:01 42         /usr/lib/with space.so
{SHARED:x}-{SHARED + 0x4000:x} rw-s 00000000 00:01 7      /dev/zero (deleted)
{STACK:x}-{STACK + 0x2000:x} rw-p 00000000 00:00 0        [stack]
"""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def pagemap(pages_id: int, runs: list[tuple[int, int]]) -> bytes:
    """A pagemap image as CRIU 4.2 writes it: runs of (address, pages), all present."""
    messages = [b"\x08" + varint(pages_id)]
    messages += [b"\x08" + varint(at) + b"\x20" + varint(4) + b"\x28" + varint(pages) for at, pages in runs]
    return bytes(8) + b"".join(struct.pack("<I", len(m)) + m for m in messages)


def processes(*pids: int) -> bytes:
    same: dict[str, object] = {"parent": 1, "uid": 1, "threads": 1, "argv": ["python", "run.py"], "maps": MAPS}
    same["descriptors"] = {"1": "/home/u/out.log"}
    found = [{"pid": pid, "name": f"p{pid}", **same} for pid in pids]
    return json.dumps({"processes": found}).encode()
