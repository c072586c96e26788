"""Where a page of a process lies in a CRIU image, and the pages that CRIU's stream may get wrong.

CRIU runs system calls inside a task by writing an instruction over the first bytes of its first executable mapping
(compel, infect.c), and puts the old bytes back after each. With --stream pages are passed on by reference (vmsplice): a
reader that is slow to take such a page from the pipe finds CRIU's instruction in it. When the dump is complete and the
tasks are still frozen the bytes are right again, so these pages are read anew then and kept beside the image; the
restore puts them in place of the streamed ones. Seen with CRIU 4.2.1: one restore in a few dozen failed with "vdso:
Invalid ELF magic", where the vdso was the first executable mapping.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from gpucr_hpc.errors import ImageError

PAGE_BYTES = 4096
PATCHES_STREAM = "patches.json"
_MAGIC_BYTES = 8
_PRESENT = 4  # PE_PRESENT, criu/include/pagemap.h; an entry without flags is present (older images)

Patches = dict[str, list[tuple[int, bytes]]]


@dataclass(frozen=True)
class PageMap:
    """A pagemap-PID.img: number of its pages file, and (address, pages) of each run in the order of the file."""

    pages_id: int
    runs: tuple[tuple[int, int], ...]

    def offset(self, address: int) -> int | None:
        """Offset in bytes of a page in the pages file, or None when the image does not have it."""
        before = 0
        for start, pages in self.runs:
            if start <= address < start + pages * PAGE_BYTES:
                return before + address - start
            before += pages * PAGE_BYTES
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data: bytes) -> dict[int, int]:
    """Numeric fields of a protobuf message; pagemap messages have no others."""
    found: dict[int, int] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7:
            raise ImageError(path="pagemap", reason=f"field of wire type {tag & 7}")
        found[tag >> 3], at = _varint(data, at)
    return found


def _messages(data: bytes) -> Iterator[dict[int, int]]:
    at = _MAGIC_BYTES
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if at + 4 + length > len(data):
            raise IndexError("cut short")
        yield _fields(data[at + 4 : at + 4 + length])
        at += 4 + length


def parse(data: bytes) -> PageMap:
    """Read a pagemap image (images/pagemap.proto): a head {1: pages_id}, then entries {1: vaddr, 2: pages as CRIU
    before 4.2 wrote them, 4: flags, 5: pages}. Raises ImageError."""
    try:
        messages = _messages(data)
        head = next(messages)
        runs = tuple(
            (m[1], m.get(5) or m.get(2, 0)) for m in messages if m.get(4, _PRESENT) & _PRESENT and not m.get(3)
        )
    except (IndexError, KeyError, StopIteration, struct.error):
        raise ImageError(path="pagemap", reason="cannot be read") from None
    return PageMap(head[1], runs)


def injected_pages(maps: str) -> list[int]:
    """Addresses of the pages in which CRIU may have written: the first of every executable mapping, from the text of
    /proc/PID/maps. It takes the first mapping that it may run in; which one is its own affair."""
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if "x" in fields[1] and not (len(fields) > 5 and fields[5] == "[vsyscall]"):
            found.append(int(fields[0].partition("-")[0], 16))
    return found


def encode_patches(patches: Patches) -> bytes:
    """Patches (pages file to offset and bytes) as they lie in an image."""
    return json.dumps({name: [[at, data.hex()] for at, data in of] for name, of in patches.items()}).encode()


def decode_patches(data: bytes) -> Patches:
    """The inverse of `encode_patches`."""
    return {name: [(at, bytes.fromhex(text)) for at, text in of] for name, of in json.loads(data).items()}
