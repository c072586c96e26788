"""What /proc says of processes that use a GPU: no call of the driver, some milliseconds per process."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from gpucr_hpc.capsule import cgroup
from gpucr_hpc.capsule.processes import Process

_CARD = re.compile(r"/dev/nvidia(\d+)")
_HIGH = 16 << 30
_LISTEN = "0A"  # state of a socket in /proc/net/tcp
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "mksh", "tcsh", "csh", "fish"})
_NCCL_MARK = b"NCCL_SHM_DISABLE"  # the name of a variable that only NCCL itself reads
_looked_at: dict[tuple[int, int, int], bool] = {}  # files of hundreds of megabytes, the same for every job
_UNLIMITED = 1 << 60  # cgroup v1 writes its lack of a limit as a huge number


def driver_loaded() -> bool:
    """Whether this node has NVIDIA's driver at all: without it no process holds anything of it."""
    try:
        known = Path("/proc/devices").read_text()
    except OSError:
        return True  # not known: each process is looked at
    return "nvidia" in known or os.path.exists("/dev/nvidiactl")


def devices(pid: int) -> Iterator[tuple[str, str]]:
    """Descriptors and mappings of NVIDIA devices: ("descriptor 7", "/dev/nvidia0")."""
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        numbers = []
    for number in numbers:
        try:
            target = os.readlink(f"{directory}/{number}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            yield f"descriptor {number}", target
    for path in sorted({line for line in _mapped(pid) if line.startswith("/dev/nvidia")}):
        yield "a mapping", path


def _mapped(pid: int) -> Iterator[str]:
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                parts = line.split(None, 5)
                if len(parts) == 6:
                    yield parts[5].rstrip("\n")
    except OSError:
        return


def maps_library(pid: int, name: str) -> bool:
    """Whether a library whose file name begins with `name` is mapped."""
    return any(path.rpartition("/")[2].startswith(name) for path in _mapped(pid))


def nccl_linked_in(pid: int) -> str:
    """The program or library of a process that NCCL was linked into, so that it has no libnccl.so; empty without."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            lines = [line.split(None, 5) for line in file]
    except OSError:
        return ""
    paths = {parts[5].rstrip("\n") for parts in lines if len(parts) == 6 and "x" in parts[1] and parts[5][0] == "/"}
    return next((path for path in sorted(paths) if _has_nccl(f"/proc/{pid}/root{path}")), "")


def _has_nccl(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            key = (info.st_dev, info.st_ino, info.st_mtime_ns)
            if key not in _looked_at:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
                    _looked_at[key] = content.find(_NCCL_MARK) >= 0
            return _looked_at[key]
    except (OSError, ValueError):
        return False


def maps_managed_memory(pid: int) -> bool:
    """A guess, for the wording of an error: managed memory is mapped from nvidia-uvm high in the address space, while
    the driver's own ranges there are in the first 16 GiB. Seen with driver 580."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            return any(
                line.rstrip().endswith("/dev/nvidia-uvm") and int(line.partition("-")[0], 16) >= _HIGH for line in file
            )
    except OSError:
        return False


def listens(pid: int) -> bool:
    """Whether a process has a listening TCP socket, or a Unix socket of NCCL's: every rank of a communicator has."""
    inodes = set()
    directory = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(directory):
            target = os.readlink(f"{directory}/{number}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == _LISTEN and parts[9] in inodes:
                    return True
        lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    except OSError:
        return True  # not known: taken for one
    return any("nccl" in line and line.split()[6] in inodes for line in lines)


def candidates(processes: list[Process]) -> list[Process]:
    """Processes that may have initialized CUDA: the driver's library is mapped. Whether they have, the driver says."""
    return [p for p in processes if p.state not in "ZX" and maps_library(p.pid, "libcuda.so")]


def cards(pid: int) -> list[int]:
    """Minor numbers of the cards that a process has open; the driver opens all that it sees."""
    found = {int(match[1]) for _, path in devices(pid) if (match := _CARD.fullmatch(path))}
    return sorted(found)


def under_job_control(pid: int) -> bool:
    """Whether a shell that watches for stopped children (`set -m`) runs a process: such a shell gives it another
    process group than its own, and would go on with the script when the process is stopped."""
    parent, group = _parent_and_group(pid)
    if _parent_and_group(parent)[1] == group:
        return False
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return False
    return name in _SHELLS


def _parent_and_group(pid: int) -> tuple[int, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[2])


def environment(pid: int) -> dict[str, str]:
    """Variables that a process was started with."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def free_memory(pid: int) -> tuple[int, str]:
    """Bytes that a process could still take, and what bounds them: the node, or a control group's limit."""
    found = (_available(), "on this node")
    for controllers, path in cgroup.memberships(pid).items():
        if controllers and "memory" not in controllers.split(","):
            continue
        point = cgroup.mount_point(controllers)
        if point is None:
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = point / path.lstrip("/")
        while group.is_relative_to(point):
            left = _headroom(group, *names)
            if left is not None and left < found[0]:
                found = (left, f"within the job's memory limit ({group.name})")
            group = group.parent
    return found


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _headroom(group: Path, limit: str, usage: str) -> int | None:
    """Bytes below a group's limit; cached file pages count as free, the kernel drops them first."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max" or int(text) > _UNLIMITED:
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return int(text) - int((group / usage).read_text()) + cached
    except (OSError, ValueError):
        return None
