"""Which memory is filled by us after CRIU, and which by CRIU: looked up in CRIU's own images.

CRIU's one thread copies every page out of a pipe. Chunks that hold nothing but pages of large private anonymous
mappings are left out of what it gets, of the pages and of the pagemap alike; it maps that memory empty, and `fill`
writes it in parallel while the tree stands still. Every page goes exactly one of the two ways.

By CRIU go, besides all that is not large:

- mappings that a parent and its child have at the same place: there CRIU shares pages between them (mem.c,
  prepare_cow_vmas), and two copies would take twice the memory;
- whatever is not plainly readable and writable: /proc/PID/mem may refuse to write there;
- stacks, shadow stacks, rings, huge page mappings: CRIU treats them in its own ways;
- pages with a registered rseq area: the kernel writes there as soon as CRIU has registered it (restorer.c,
  restore_rseq). Nothing else of such memory is written between its mapping and `post-restore`.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpucr_hpc.engine import pagemap, protobuf
from gpucr_hpc.engine.pagemap import PAGE_BYTES
from gpucr_hpc.errors import ImageError
from gpucr_hpc.image.reader import ImageReader

#: A mapping of less is CRIU's.
MAPPING_BYTES = 4 << 20
#: With less to fill in all, CRIU restores everything: a hook costs it some processes.
TREE_BYTES = 128 << 20

_FILE = re.compile(r"(mm|core|pagemap)-([0-9]+)\.img")
_PSTREE = "pstree.img"
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
# Flags of mmap(2): MAP_PRIVATE, MAP_ANONYMOUS; MAP_GROWSDOWN, MAP_HUGETLB.
_WANTED_FLAGS, _OTHER_FLAGS = 0x22, 0x40100
# criu/include/image.h: VMA_AREA_REGULAR, VMA_ANON_PRIVATE; VMA_AREA_HEAP may be there, too.
_WANTED_STATUS, _HEAP = 0x201, 0x20

Range = tuple[int, int]


@dataclass(frozen=True)
class Area:
    """A mapping of mm-PID.img that CRIU restores: its addresses, and whether it may be filled."""

    start: int
    end: int
    plain: bool


class Numbers:
    """A set of numbers, as few ranges: a large image has millions of chunks."""

    def __init__(self, ranges: Iterable[range]) -> None:
        self._ranges = list(ranges)
        self._ends = [part.stop for part in self._ranges]

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect.bisect_right(self._ends, number)
        return at < len(self._ranges) and number in self._ranges[at]


@dataclass(frozen=True)
class Part:
    """What is filled of one process.

    pid: inside the namespace. pages: name of its pages file. pagemap: what CRIU gets in the place of its pagemap file.
    left_out: chunks that CRIU does not get. size_bytes: of these. places: (offset in the pages file, address, bytes) of
    every run of pages, by offset. mappings: those that may be filled.
    """

    pid: int
    pages: str
    pagemap_name: str
    pagemap: bytes
    left_out: Numbers
    size_bytes: int
    places: tuple[tuple[int, int, int], ...]
    mappings: tuple[Range, ...] = ()

    def addresses(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where `size` bytes from `offset` of the pages file belong: (from, to) among them, address."""
        at = bisect.bisect_right(self.places, offset, key=lambda place: place[0]) - 1
        end = offset + size
        while at < len(self.places) and self.places[at][0] < end:
            begins, address, length = self.places[at]
            first, last = max(begins, offset), min(begins + length, end)
            yield first - offset, last - offset, address + first - begins
            at += 1


def make(reader: ImageReader, patches: pagemap.Patches) -> list[Part]:
    """What is filled, by process; nothing for a small tree. Chunks with patches are CRIU's. Raises ImageError."""
    names = [match for match in map(_FILE.fullmatch, reader.names()) if match]
    size = sum(reader.size(name) for name in reader.names() if name.startswith("pages-"))
    if size < TREE_BYTES or _PSTREE not in reader.names():
        return []
    try:
        mappings = {int(m[2]): _mappings(reader.read(m[0]), m[0]) for m in names if m[1] == "mm"}
        fixed = [page for m in names if m[1] == "core" for page in _rseq_pages(reader.read(m[0]), m[0])]
        shared = _inherited(mappings, _parents(reader.read(_PSTREE)))
    except IndexError:
        raise ImageError(path="CRIU's files in the image", reason="cannot be read") from None
    parts = []
    for match in names:
        pid = int(match[2])
        ranges = [
            (m.start, m.end)
            for m in mappings.get(pid, ())
            if m.plain and m.end - m.start >= MAPPING_BYTES and (m.start, m.end) not in shared.get(pid, ())
        ]
        if match[1] == "pagemap" and ranges:
            part = _part(reader, pid, match[0], _less(ranges, fixed), patches)
            if part is not None:
                parts.append(replace(part, mappings=tuple(ranges)))
    return parts if sum(part.size_bytes for part in parts) >= TREE_BYTES else []


def split(
    runs: Sequence[tuple[int, int]], ends: Sequence[int], ranges: Sequence[Range], kept: Sequence[int] = ()
) -> list[tuple[range, Range]]:
    """The chunks of a pages file that hold whole pages of `ranges` alone: neighbours as a range of their numbers, with
    begin and end in the file.

    runs: (address, pages) of a pagemap, in order. ends: 0, then where each chunk ends in the file. ranges: ascending
    addresses. kept: places in the file; a chunk with one of them is not among those found.
    """
    odd = (number for number, end in enumerate(ends) if end % PAGE_BYTES)
    others = {bisect.bisect_right(ends, place) - 1 for place in kept} | {n for end in odd for n in (end - 1, end)}
    out = sorted(others)
    found: list[tuple[range, Range]] = []
    for begin, end in _inside(runs, ranges):
        first, last = bisect.bisect_left(ends, begin), bisect.bisect_right(ends, end) - 1
        for stop in [*out[bisect.bisect_left(out, first) : bisect.bisect_left(out, last)], last]:
            if first < stop:
                found.append((range(first, stop), (ends[first], ends[stop])))
            first = stop + 1
    return found


def _inside(runs: Sequence[tuple[int, int]], ranges: Sequence[Range]) -> Iterator[Range]:
    """Places in the pages file of the pages of `ranges`; ascending, adjacent ones as one."""
    last: Range | None = None
    ends = [end for _, end in ranges]
    offset = 0
    for address, pages in runs:
        end = address + pages * PAGE_BYTES
        at = bisect.bisect_right(ends, address)
        while at < len(ranges) and ranges[at][0] < end:
            first, upto = max(ranges[at][0], address), min(ranges[at][1], end)
            new = (offset + first - address, offset + upto - address)
            if last is not None and last[1] == new[0]:
                last = (last[0], new[1])
            else:
                if last is not None:
                    yield last
                last = new
            at += 1
        offset += end - address
    if last is not None:
        yield last


def _part(reader: ImageReader, pid: int, name: str, ranges: Sequence[Range], patches: pagemap.Patches) -> Part | None:
    data = reader.read(name)
    mapped = pagemap.parse(data)
    pages = f"pages-{mapped.pages_id}.img"
    stream = reader.index.streams.get(pages)
    if stream is None or sum(count for _, count in mapped.runs) * PAGE_BYTES != stream.size_bytes:
        return None  # CRIU says what is wrong with it
    patched = [offset for offset, _ in patches.get(pages, ())]
    ends = list(itertools.accumulate(stream.sizes(), initial=0))
    taken = split(mapped.runs, ends, ranges, patched)
    if not taken:
        return None
    places, offset = [], 0
    for address, count in mapped.runs:
        places.append((offset, address, count * PAGE_BYTES))
        offset += count * PAGE_BYTES
    return Part(
        pid,
        pages,
        name,
        pagemap.without(data, [place for _, place in taken]),
        Numbers(numbers for numbers, _ in taken),
        sum(end - begin for _, (begin, end) in taken),
        tuple(places),
    )


def _less(ranges: Iterable[Range], pages: Sequence[int]) -> list[Range]:
    """Ranges without some pages."""
    found, without = [], sorted(set(pages))
    for start, end in ranges:
        for page in without[bisect.bisect_left(without, start) : bisect.bisect_left(without, end)]:
            if start < page:
                found.append((start, page))
            start = page + PAGE_BYTES
        if start < end:
            found.append((start, end))
    return found


def _inherited(mappings: Mapping[int, Sequence[Area]], parents: Mapping[int, int]) -> dict[int, set[Range]]:
    """Of each process, the mappings that its parent or a child of it has at the same place."""
    places = {pid: {(m.start, m.end) for m in found} for pid, found in mappings.items()}
    shared: dict[int, set[Range]] = {}
    for pid, parent in parents.items():
        common = places.get(pid, set()) & places.get(parent, set())
        for one in (pid, parent):
            shared.setdefault(one, set()).update(common)
    return shared


def _mappings(data: bytes, path: str) -> list[Area]:
    """images/mm.proto {14: mappings}, images/vma.proto {1: start, 2: end, 5: prot, 6: flags, 7: status}."""
    found = []
    for message in protobuf.messages(data, path):
        for vma in protobuf.parts(message, 14):
            start, end, prot, flags, status = (protobuf.number(vma, field) or 0 for field in (1, 2, 5, 6, 7))
            plain = (
                prot == _READ_WRITE
                and flags & (_WANTED_FLAGS | _OTHER_FLAGS) == _WANTED_FLAGS
                and status & ~_HEAP == _WANTED_STATUS
            )
            found.append(Area(start, end, plain))
    return found


def _rseq_pages(data: bytes, path: str) -> Iterator[int]:
    """Pages of a thread's rseq area: images/core.proto {5: thread_core {15: rseq_entry {1: address, 2: bytes}}}."""
    for message in protobuf.messages(data, path):
        for thread in protobuf.parts(message, 5):
            for rseq in protobuf.parts(thread, 15):
                address, size = protobuf.number(rseq, 1) or 0, protobuf.number(rseq, 2) or 1
                yield from range(address // PAGE_BYTES * PAGE_BYTES, address + size, PAGE_BYTES)


def _parents(data: bytes) -> dict[int, int]:
    """images/pstree.proto {1: pid, 2: ppid}."""
    messages = protobuf.messages(data, _PSTREE)
    return {protobuf.number(m, 1) or 0: protobuf.number(m, 2) or 0 for m in messages}
