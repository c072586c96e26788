"""Whether a tree's memory is read beside CRIU: decided before it is frozen, by what its processes have mapped.

CRIU's one thread passes on 2 to 5 GB/s; several threads read a frozen process faster, but need processors for it. What
CRIU passes on all the same waits in the worker's memory until its place is known, so it must be little.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: With less, CRIU passes everything on.
LARGE_BYTES = 1 << 30
#: With more that only CRIU can pass on, or more than a quarter of the rest, it does so with everything.
REST_BYTES = 2 << 30
#: Fewer processors have enough to do with sealing.
PROCESSORS = 5
#: A mapping of less is CRIU's (spank_plugin/criu_memory.c).
MAPPING_BYTES = 4 << 20
PLUGIN = Path("/usr/lib/gpucr/criu_memory.so")

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)")
# PAGEMAP_SCAN, struct pm_scan_arg and PAGE_IS_PRESENT, linux/fs.h
_SCAN = 0xC0606610
_QUESTION = struct.Struct("12Q")
_PRESENT = 1 << 3
_RANGES = 512  # of one answer, at most
_PAGE_BYTES = 4096


@dataclass
class Memory:
    """Bytes of a tree that a dump must write: in mappings that CRIU need not be shown, and others."""

    large: int = 0
    rest: int = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether it is to be read beside CRIU on a machine with enough processors."""
        return self.large >= LARGE_BYTES and self.rest <= min(REST_BYTES, self.large // 4)


def wanted(pids: Sequence[int], rest_bytes: int | None = None) -> bool:
    """Whether the memory of these processes is to be read beside CRIU, and can be. rest_bytes: what of it is not large,
    where that was measured before: with small pages it takes half a second for 20 GiB."""
    if not has_processors() or not PLUGIN.is_file() or not kernel_names_pages():
        return False
    total = sum(map(_anonymous_bytes, pids))
    if total < LARGE_BYTES:
        return False
    return (measure(pids) if rest_bytes is None else Memory(total - rest_bytes, rest_bytes)).is_worth_it


def has_processors() -> bool:
    """Whether several threads may read beside those that seal."""
    return len(os.sched_getaffinity(0)) >= PROCESSORS


def plugin_folder(work: Path) -> Path:
    """A folder in CRIU's work directory that holds its plugin, and those that it always has."""
    folder = work / "plugins"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "libdir", folder, symlinks=True)
    (folder / PLUGIN.name).symlink_to(PLUGIN)
    return folder


def kernel_names_pages() -> bool:
    """Whether CRIU asks this kernel for pages in the way that its plugin answers (PAGEMAP_SCAN, Linux 6.7)."""
    page = array.array("Q", [0]).buffer_info()[0] // _PAGE_BYTES * _PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb") as file:
            present_pages(file.fileno(), page, page + _PAGE_BYTES)
            return True
    except OSError:
        return False


def present_pages(pagemap: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Ranges of pages in memory, in order. pagemap: descriptor of /proc/PID/pagemap. Raises OSError."""
    found: list[tuple[int, int]] = []
    answer = array.array("Q", bytes(_RANGES * 3 * 8))
    address, _ = answer.buffer_info()
    while begin < end:
        asked = (_QUESTION.size, 0, begin, end, 0, address, _RANGES, 0, 0, 0, _PRESENT, _PRESENT)
        count = fcntl.ioctl(pagemap, _SCAN, bytearray(_QUESTION.pack(*asked)))
        found += [(answer[3 * number], answer[3 * number + 1]) for number in range(count)]
        if count < _RANGES:
            break
        begin = found[-1][1]  # its word on where it stopped is not relied on (docs/architecture.md)
    return found


def measure(pids: Iterable[int]) -> Memory:
    """What some processes have now; those that are gone have nothing."""
    found = Memory()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps", errors="replace") as file:
                _add(found, file)
        except OSError:
            continue
    return found


def has_some(pid: int) -> bool:
    """Whether a process can have such a mapping at all."""
    return _anonymous_bytes(pid) >= MAPPING_BYTES


def _anonymous_bytes(pid: int) -> int:
    """All anonymous memory of a process; it is known without a walk through its mappings."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("RssAnon:", "VmSwap:")))
    except OSError:
        return 0


def _add(found: Memory, smaps: Iterable[str]) -> None:
    large = False
    for line in smaps:
        name, _, rest = line.partition(":")
        if name in ("Anonymous", "Private_Hugetlb", "Swap"):
            size = int(rest.split()[0]) * 1024
            if large:
                found.large += size
            else:
                found.rest += size
        elif (head := _HEAD.match(line)) is not None:
            place = _anonymous(head)
            large = place is not None and place[1] - place[0] >= MAPPING_BYTES


def anonymous_mappings(maps: Iterable[str]) -> list[tuple[int, int]]:
    """Private anonymous memory that can be read and written, of /proc/PID/maps; neighbours are one."""
    found: list[tuple[int, int]] = []
    for line in maps:
        head = _HEAD.match(line)
        place = _anonymous(head) if head is not None else None
        if place is not None and found and found[-1][1] == place[0]:
            found[-1] = (found[-1][0], place[1])
        elif place is not None:
            found.append(place)
    return found


def _anonymous(head: re.Match[str]) -> tuple[int, int] | None:
    """Begin and end of a mapping of that kind."""
    begin, end, mode, inode, path = head.groups()
    plain = not path or path == "[heap]" or path.startswith("[anon:")
    return (int(begin, 16), int(end, 16)) if mode[:2] == "rw" and mode[3] == "p" and inode == "0" and plain else None
