"""Memory that CRIU cannot save, or cannot bring back: found in /proc/PID/maps."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+\s*(.*)$")
_NVIDIA = "/dev/nvidia"
_PLAIN = ("/dev/shm/", "/dev/zero", "/dev/hugepages/")  # noqa: S108 - files, or anonymous memory
_HUGE_PAGES = ("/anon_hugepage", "/dev/hugepages/")
_WITHOUT_IO_URING = "sbatch --checkpoint-io-uring=hide keeps programs from it"


def unsaved(pid: int, *, gpus: bool) -> Iterator[str]:
    """What stands against a checkpoint, each kind of memory once. gpus: what NVIDIA's driver maps is no hindrance."""
    seen: set[str] = set()
    most = _reservable()
    for start, size_bytes, access, path in _all(pid):
        if gpus and path.startswith(_NVIDIA):
            continue
        what = _why_not(access, path)
        if what is None and not path and size_bytes > most and not _reserved_without_memory(pid, start):
            what = f"has {size_bytes >> 30} GiB of addresses reserved, more than CRIU can here (vm.overcommit_memory=1)"
        if what is not None and what not in seen:
            seen.add(what)
            yield what


def _all(pid: int) -> Iterator[tuple[str, int, str, str]]:
    """Each mapping: its start as in the file, size in bytes, access, path or nothing."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                found = _LINE.match(line.rstrip("\n"))
                if found:
                    yield found[1], int(found[2], 16) - int(found[1], 16), found[3], found[4]
    except OSError:
        return


def _why_not(access: str, path: str) -> str | None:
    if path.startswith("anon_inode:[io_uring]"):
        return f"has an io_uring ring mapped ({_WITHOUT_IO_URING})"
    if path.startswith(_HUGE_PAGES) and access.endswith("p"):
        return "has private huge pages (MAP_HUGETLB), which CRIU cannot take from a stream: use transparent ones"
    if path.startswith("/dev/") and not path.startswith(_PLAIN):
        return f"has memory of the device {path} mapped"
    if path == "[uprobes]":
        return "has a tracer's probe (uprobe) mapped"
    return None


def _reservable() -> float:
    """Bytes that one mapping may have here: CRIU maps again as writable what the job only reserved (proc(5),
    overcommit_memory)."""
    try:
        with open("/proc/sys/vm/overcommit_memory") as mode, open("/proc/meminfo") as file:
            if mode.read().strip() != "0":
                return float("inf")
            sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
            return sizes["MemTotal"] + sizes["SwapTotal"]
    except OSError:
        return float("inf")


def _reserved_without_memory(pid: int, start: str) -> bool:
    """Whether the mapping is one of MAP_NORESERVE, which CRIU keeps."""
    inside = False
    try:
        with open(f"/proc/{pid}/smaps", errors="replace") as file:
            for line in file:
                if _LINE.match(line.rstrip("\n")):
                    inside = line.startswith(f"{start}-")
                elif inside and line.startswith("VmFlags:"):
                    return "nr" in line.split()
    except OSError:
        pass
    return True
