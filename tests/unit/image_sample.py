"""A process tree in a checkpoint as far as `gpucr inspect` reads them."""

from __future__ import annotations

import json

HEAP, STACK, FILE, SHARED = 0x10000000, 0x7FF000000000, 0x20000000, 0x30000000
MAPS = f"""{HEAP:x}-{HEAP + 0x800000:x} rw-p 00000000 00:00 0                  [heap]
{FILE:x}-{FILE + 0x2000:x} r--p 00000000 08:01 42         /usr/lib/with space.so
{SHARED:x}-{SHARED + 0x4000:x} rw-s 00000000 00:01 7      /dev/zero (deleted)
{STACK:x}-{STACK + 0x2000:x} rw-p 00000000 00:00 0        [stack]
"""


def processes(*pids: int) -> bytes:
    same: dict[str, object] = {"parent": 1, "uid": 1, "threads": 1, "argv": ["python", "run.py"], "maps": MAPS}
    same["descriptors"] = {"1": "/home/u/out.log"}
    found = [{"pid": pid, "name": f"p{pid}", **same} for pid in pids]
    return json.dumps({"processes": found}).encode()
