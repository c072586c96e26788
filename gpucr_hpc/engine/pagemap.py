"""Where a page of a process lies in a CRIU image, and the pages that CRIU's stream may get wrong.

CRIU runs system calls inside a task by writing an instruction over the first bytes of its first executable mapping
(compel, infect.c), and puts the old bytes back after each. With --stream pages are passed on by reference (vmsplice): a
reader that is slow to take such a page from the pipe finds CRIU's instruction in it. When the dump is complete and the
tasks are still frozen the bytes are right again, so these pages are read anew then and kept beside the image; the
restore puts them in place of the streamed ones. Seen with CRIU 4.2.1: one restore in a few dozen failed with "vdso:
Invalid ELF magic", where the vdso was the first executable mapping.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from gpucr_hpc.engine import protobuf
from gpucr_hpc.errors import ImageError

PAGE_BYTES = 4096
PATCHES_STREAM = "patches.json"
_ADDRESS, _OLD_PAGES, _IN_PARENT, _FLAGS, _PAGES = 1, 2, 3, 4, 5  # fields of an entry
# PE_LAZY and PE_PRESENT, criu/include/pagemap.h; an entry without flags is present (older images).
_LAZY, _PRESENT = 2, 4

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


def parse(data: bytes) -> PageMap:
    """Read a pagemap image (images/pagemap.proto): a head {1: pages_id}, then entries {1: vaddr, 2: pages as CRIU
    before 4.2 wrote them, 4: flags, 5: pages}. Raises ImageError."""
    head, entries = _read(data)
    return PageMap(head[1], tuple(_run(entry) for entry in entries if _present(entry)))


def without(data: bytes, taken: Sequence[tuple[int, int]]) -> bytes:
    """The same image without some pages, whose bytes are taken out of the pages file, too.

    taken: begin and end of their places in the pages file, ascending, at page boundaries. Raises ImageError.
    """
    head, entries = _read(data)
    out = [data[: protobuf.MAGIC_BYTES], protobuf.encode(head)]
    offset = 0
    for entry in entries:
        if not _present(entry):
            out.append(protobuf.encode(entry))
            continue
        address, pages = _run(entry)
        end = offset + pages * PAGE_BYTES
        field = _PAGES if entry.get(_PAGES) else _OLD_PAGES
        for at, stop in _outside(offset, end, taken):
            part = entry | {_ADDRESS: address + at - offset, field: (stop - at) // PAGE_BYTES}
            out.append(protobuf.encode(part))
        offset = end
    return b"".join(out)


def merged(data: bytes, ranges: Sequence[tuple[int, int]]) -> tuple[bytes, list[tuple[int, int, bool]]]:
    """The same image with pages that CRIU was not shown, as if it had been, and (address, bytes, whether the range was
    among these) of every run in the order of the pages file.

    ranges: begin and end of them. A page that is in several of them, or that CRIU has, too, is the same page of the
    same frozen process each time, with the same bytes: it is taken once, from CRIU where CRIU has it, since its pages
    file has the bytes in any case. Raises ImageError, also when CRIU's own pages are out of order or there twice.
    """
    head, entries = _read(data)
    new = any(entry.get(_PAGES) for entry in entries)
    if any(one[_ADDRESS] > other[_ADDRESS] for one, other in itertools.pairwise(entries)):
        raise ImageError(path="pagemap", reason="its pages are not in the order of their addresses")
    known = [(at, at + pages * PAGE_BYTES) for at, pages in (_run(entry) for entry in entries if _present(entry))]
    added = []
    last = 0
    for begin, end in sorted(ranges):
        for at, stop in _outside(max(begin, last), end, known):
            pages = (stop - at) // PAGE_BYTES
            counts = {_OLD_PAGES: 0, _PAGES: pages} if new else {_OLD_PAGES: pages}
            added.append({_ADDRESS: at, _FLAGS: _PRESENT | _LAZY} | counts)
        last = max(last, end)
    both = sorted([(e, False) for e in entries] + [(e, True) for e in added], key=lambda pair: pair[0][_ADDRESS])
    out = [data[: protobuf.MAGIC_BYTES], protobuf.encode(head)]
    runs: list[tuple[int, int, bool]] = []
    last = 0
    for entry, ours in both:
        address, pages = _run(entry)
        if address < last:
            raise ImageError(path="pagemap", reason=f"has page {address:#x} twice")
        last = address + pages * PAGE_BYTES
        out.append(protobuf.encode(dict(sorted(entry.items()))))
        if _present(entry):
            runs.append((address, pages * PAGE_BYTES, ours))
    return b"".join(out), runs


def _outside(begin: int, end: int, taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of a range that are in none of others, which are ascending and apart."""
    number = bisect.bisect_right(taken, begin, key=lambda other: other[1])
    while begin < end:
        first, last = taken[number] if number < len(taken) else (end, end)
        if begin < first:
            yield begin, min(first, end)
        begin, number = last, number + 1


def _read(data: bytes) -> tuple[dict[int, int], list[dict[int, int]]]:
    """Head and entries; all of their fields are numbers."""
    try:
        found = [
            {field: values[-1] for field, values in message.items()} for message in protobuf.messages(data, "pagemap")
        ]
        head, *entries = found
        if not all(isinstance(value, int) for message in found for value in message.values()):
            raise IndexError("no number")
        if 1 not in head or any(_ADDRESS not in entry for entry in entries):
            raise IndexError("field is missing")
    except (IndexError, ValueError):
        raise ImageError(path="pagemap", reason="cannot be read") from None
    return cast(dict[int, int], head), cast(list[dict[int, int]], entries)


def _present(entry: dict[int, int]) -> bool:
    return bool(entry.get(_FLAGS, _PRESENT) & _PRESENT) and not entry.get(_IN_PARENT)


def _run(entry: dict[int, int]) -> tuple[int, int]:
    return entry[_ADDRESS], entry.get(_PAGES) or entry.get(_OLD_PAGES, 0)


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
