"""What an image holds, and where in a job's memory something lies.

Who calls: the worker, for `gpucr inspect`. `describe` opens small streams and the index, no page of memory;
`search` opens every page.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpucr_hpc.engine import pagemap, summary
from gpucr_hpc.image.chunks import ChunkKind
from gpucr_hpc.image.layout import Stream
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.model import Json

#: How a part of memory is kept: nothing at all, as it is, compressed, in an earlier checkpoint, twice the same.
WAYS = ("zero", "raw", "compressed", "referenced", "repeated")
_PAGEMAP = re.compile(r"pagemap-(shmem-)?([0-9]+)\.img")
_MAX_REGIONS = 20000


@dataclass
class Region:
    """A mapping of a process: addresses, permissions, what is behind it, and how many of its bytes are in the image and
    in which way; what is mapped and not counted lies in a file or was never touched."""

    start: int
    end: int
    permissions: str
    path: str
    ways: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """anonymous, shared (memory that several processes may have mapped) or file (a private view of one)."""
        if self.permissions.endswith("s"):
            return "shared"
        return "file" if self.path.startswith("/") else "anonymous"

    def as_dict(self) -> Json:
        return {
            "start": self.start,
            "end": self.end,
            "permissions": self.permissions,
            "path": self.path,
            "kind": self.kind,
            "image_bytes": dict(self.ways),
        }


def describe(reader: ImageReader) -> Json:
    """Processes with their memory, shared memory, and every stream with the way in which its bytes are kept."""
    seen: set[tuple[int, int, int]] = set()
    pieces = {name: list(_pieces(stream, seen)) for name, stream in reader.index.streams.items()}
    processes = summary.decode(reader.read(summary.SUMMARY_STREAM)) if _has(reader, summary.SUMMARY_STREAM) else []
    by_pid = {int(process["pid"]): process for process in processes}
    shared: Counter[str] = Counter()
    for is_shared, number, mapped in _pagemaps(reader):
        parts = pieces.get(f"pages-{mapped.pages_id}.img", [])
        if is_shared:
            for _, _, way, size in _placed(mapped, parts):
                shared[way] += size
            continue
        process = by_pid.setdefault(number, {"pid": number, "parent": 0, "name": "", "maps": ""})
        regions = regions_of(str(process["maps"]))
        _fill(regions, mapped, parts)
        process["memory"] = [r.as_dict() for r in regions[:_MAX_REGIONS]]
    for process in by_pid.values():
        process.pop("maps")
        process.setdefault("memory", [])
    streams = [
        {"name": name, "bytes": stream.size_bytes, "ways": dict(_total(pieces[name]))}
        for name, stream in reader.index.streams.items()
    ]
    return {
        "node_rank": reader.entry.node_rank,
        "processes": [by_pid[pid] for pid in sorted(by_pid)],
        "shared_memory": dict(shared),
        "streams": streams,
    }


def search(reader: ImageReader, pattern: bytes, context_bytes: int, limit: int) -> list[Json]:
    """Where `pattern` lies in the memory of the image: pid (0: shared memory), address, and the bytes around it (hex).

    A match may go over the end of a page where the next page of the process follows in memory.
    """
    found: list[Json] = []
    for is_shared, number, mapped in _pagemaps(reader):
        name = f"pages-{mapped.pages_id}.img"
        if _has(reader, name):
            for address, around, before in _matches(reader, name, mapped, pattern, context_bytes):
                pid = 0 if is_shared else number
                found.append({"pid": pid, "address": address, "bytes": around.hex(), "before": before})
                if len(found) >= limit:
                    return found
    return found


def regions_of(maps: str) -> list[Region]:
    """Regions from the text of /proc/PID/maps, by address."""
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) > 5 else ""
        found.append(Region(int(start, 16), int(end, 16), fields[1], path))
    return found


def _has(reader: ImageReader, name: str) -> bool:
    return name in reader.index.streams


def _pagemaps(reader: ImageReader) -> Iterator[tuple[bool, int, pagemap.PageMap]]:
    """Of each process, and of each piece of shared memory: whether it is shared, its number, its pages."""
    for name in reader.names():
        match = _PAGEMAP.fullmatch(name)
        if match:
            yield bool(match[1]), int(match[2]), pagemap.parse(reader.read(name))


def _pieces(stream: Stream, seen: set[tuple[int, int, int]]) -> Iterator[tuple[int, int, str]]:
    """Offset and length of each chunk of a stream and the way in which it is kept. seen: places met before."""
    at = 0
    for number in range(len(stream)):
        chunk = stream.chunk(number)
        place = (chunk.source, chunk.pack, chunk.offset)
        if chunk.kind == ChunkKind.ZERO:
            way = "zero"
        elif chunk.source:
            way = "referenced"
        elif place in seen:
            way = "repeated"
        else:
            way = "raw" if chunk.kind == ChunkKind.RAW else "compressed"
            seen.add(place)
        yield at, chunk.plain, way
        at += chunk.plain


def _total(parts: list[tuple[int, int, str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for _, size, way in parts:
        total[way] += size
    return total


def _placed(mapped: pagemap.PageMap, parts: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, str, int]]:
    """The runs of a process cut at the ends of chunks: address, end, way, bytes."""
    starts = [start for start, _, _ in parts]
    offset = 0
    for address, pages in mapped.runs:
        left = pages * pagemap.PAGE_BYTES
        while left:
            at = bisect.bisect_right(starts, offset) - 1
            if at < 0 or offset >= parts[at][0] + parts[at][1]:
                return  # a pages file that is shorter than its map: `verify` says so
            size = min(left, parts[at][0] + parts[at][1] - offset)
            yield address, address + size, parts[at][2], size
            address, offset, left = address + size, offset + size, left - size


def _fill(regions: list[Region], mapped: pagemap.PageMap, parts: list[tuple[int, int, str]]) -> None:
    """Count what is in the image for each region; pages outside all of them make one of their own."""
    starts = [region.start for region in regions]
    strays: list[Region] = []
    for start, end, way, _size in _placed(mapped, parts):
        while start < end:
            at = bisect.bisect_right(starts, start) - 1
            if at >= 0 and start < regions[at].end:
                upto = min(end, regions[at].end)
                regions[at].ways[way] += upto - start
            else:
                upto = min(end, starts[at + 1]) if at + 1 < len(starts) else end
                strays.append(Region(start, upto, "----", "", Counter({way: upto - start})))
            start = upto
    regions += strays


def _matches(
    reader: ImageReader, name: str, mapped: pagemap.PageMap, pattern: bytes, context: int
) -> Iterator[tuple[int, bytes, int]]:
    """Address of each match, the bytes around it, and how many of those are before it."""
    runs, offsets = mapped.runs, [0]
    for _, pages in runs:
        offsets.append(offsets[-1] + pages * pagemap.PAGE_BYTES)
    joined = _joined(runs, offsets)
    keep = len(pattern) - 1 + context
    window, begin, looked = b"", 0, 0  # bytes at hand, their offset in the file, matches before here are known
    for piece in itertools.chain(reader.pieces(name), (None,)):
        window += piece if piece is not None else b""
        last = begin + len(window) - (context if piece is not None else 0)
        at = window.find(pattern, max(0, looked - begin))
        while at >= 0 and begin + at + len(pattern) <= last:
            offset = begin + at
            run = bisect.bisect_right(offsets, offset) - 1
            if run < len(runs) and offset + len(pattern) <= joined[run]:
                first = max(at - context, 0, _begin(joined, offsets, run) - begin)
                end = min(at + len(pattern) + context, joined[run] - begin)
                yield runs[run][0] + offset - offsets[run], window[first:end], at - first
            looked = offset + 1
            at = window.find(pattern, looked - begin)
        looked = max(looked, last - len(pattern) + 1)
        cut = max(0, min(len(window) - keep - context, looked - begin - context))
        window, begin = window[cut:], begin + cut


def _joined(runs: tuple[tuple[int, int], ...], offsets: list[int]) -> list[int]:
    """For each run the offset at which the memory that follows it without a gap ends."""
    ends = offsets[1:]
    for number in range(len(runs) - 2, -1, -1):
        if runs[number][0] + runs[number][1] * pagemap.PAGE_BYTES == runs[number + 1][0]:
            ends[number] = ends[number + 1]
    return ends


def _begin(joined: list[int], offsets: list[int], run: int) -> int:
    """The offset at which the memory that leads to a run without a gap begins."""
    while run and joined[run - 1] == joined[run]:
        run -= 1
    return offsets[run]
