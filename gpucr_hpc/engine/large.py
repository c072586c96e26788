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


def wanted(pids: Sequence[int]) -> bool:
    """Whether the memory of these processes is to be read beside CRIU, and can be."""
    if len(os.sched_getaffinity(0)) < PROCESSORS or not PLUGIN.is_file() or not kernel_names_pages():
        return False
    return sum(map(_anonymous_bytes, pids)) >= LARGE_BYTES and measure(pids).is_worth_it


def plugin_folder(work: Path) -> Path:
    """A folder in CRIU's work directory that holds its plugin, and those that it always has."""
    folder = work / "plugins"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "libdir", folder, symlinks=True)
    (folder / PLUGIN.name).symlink_to(PLUGIN)
    return folder


def kernel_names_pages() -> bool:
    """Whether CRIU asks this kernel for pages in the way that its plugin answers (PAGEMAP_SCAN, Linux 6.7)."""
    answer = array.array("Q", [0, 0, 0])
    at, _ = answer.buffer_info()
    page = at // _PAGE_BYTES * _PAGE_BYTES
    asked = (_QUESTION.size, 0, page, page + _PAGE_BYTES, 0, at, 1, 0, 0, 0, _PRESENT, _PRESENT)
    try:
        with open("/proc/self/pagemap", "rb") as file:
            fcntl.ioctl(file, _SCAN, bytearray(_QUESTION.pack(*asked)))
            return True
    except OSError:
        return False


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
            begin, end, mode, inode, path = head.groups()
            large = (
                int(end, 16) - int(begin, 16) >= MAPPING_BYTES
                and mode[:2] == "rw"
                and mode[3] == "p"
                and inode == "0"
                and (not path or path == "[heap]" or path.startswith("[anon:"))
            )
