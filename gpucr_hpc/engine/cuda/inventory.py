"""The GPUs of a node and who uses their memory, as nvidia-smi says; and which of them a job was given."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import CudaDriverUnusable, CudaMapImpossible, ToolMissing
from gpucr_hpc.proc import clean_env, run

_LIMIT_S = 30.0
_MIB = 1 << 20
_GPU_FIELDS = "index,uuid,name,pci.bus_id,memory.total,memory.used,mig.mode.current,driver_version"
_PROC = Path("/proc/driver/nvidia/gpus")
MINIMUM_DRIVER, REMAP_DRIVER = 570, 580


@dataclass(frozen=True)
class Gpu:
    """One card. minor: N of /dev/nvidiaN, by which a process holds it; -1 when not known."""

    index: int
    uuid: str
    name: str
    minor: int
    memory_bytes: int
    used_bytes: int
    mig: bool = False


@dataclass(frozen=True)
class Inventory:
    """driver: version text. used: pid on the host to bytes of GPU memory, on all cards together."""

    driver: str
    gpus: tuple[Gpu, ...]
    used: Mapping[int, int] = field(default_factory=dict)
    mps: bool = False

    @property
    def branch(self) -> int:
        """Major number of the driver."""
        return int(self.driver.partition(".")[0] or 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Inventory:
        gpus = tuple(Gpu(**gpu) for gpu in table["gpus"])
        used = {int(pid): int(size) for pid, size in table["used"].items()}
        return cls(table["driver"], gpus, used, table["mps"])


def read() -> Inventory:
    """Ask nvidia-smi; raise CudaDriverUnusable when it does not answer."""
    cards = _query(f"--query-gpu={_GPU_FIELDS}")
    apps = _query("--query-compute-apps=pid,used_gpu_memory")
    gpus, driver = [], "0"
    for index, uuid, name, bus, total, used, mig, driver in cards:  # noqa: B007 - the last line's driver is everyone's
        gpus.append(Gpu(int(index), uuid, name, _minor(bus), _mib(total), _mib(used), mig.strip().lower() == "enabled"))
    sizes: dict[int, int] = {}
    for pid, size in apps:
        sizes[int(pid)] = sizes.get(int(pid), 0) + _mib(size)
    return Inventory(driver, tuple(gpus), sizes, _mps_runs())


def _query(what: str) -> list[list[str]]:
    try:
        done = run(["nvidia-smi", what, "--format=csv,noheader,nounits"], timeout_s=_LIMIT_S, env=_env())
    except ToolMissing:
        raise CudaDriverUnusable(reason="nvidia-smi is not installed") from None
    if done.status != 0:
        raise CudaDriverUnusable(reason=f"nvidia-smi: {(done.stderr or done.stdout).strip()[-300:]}")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _env() -> dict[str, str]:
    """Root's own search path, with the folders after it in which some hosts keep the driver's programs."""
    env = clean_env()
    return env | {"PATH": f"{env['PATH']}:{os.environ.get('PATH', '')}"}


def _mib(text: str) -> int:
    return int(text) * _MIB if text.isdigit() else 0


def _minor(bus: str) -> int:
    """nvidia-smi writes a domain of eight digits, the kernel one of four."""
    short = re.sub(r"^0000(?=[0-9a-fA-F]{4}:)", "", bus).lower()
    try:
        text = (_PROC / short / "information").read_text()
    except OSError:
        return -1
    found = re.search(r"Device Minor:\s*(\d+)", text)
    return int(found[1]) if found else -1


def _mps_runs() -> bool:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                name = Path(f"/proc/{entry}/comm").read_text()
            except OSError:
                continue
            if name.startswith("nvidia-cuda-mps"):
                return True
    return False


def allocated(env: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """The cards that a process was given, in its order, by Slurm's variables or CUDA_VISIBLE_DEVICES; all without.

    SLURM_STEP_GPUS and SLURM_JOB_GPUS count the node's cards; CUDA_VISIBLE_DEVICES too, unless a device cgroup hides
    the others, and then it is shorter than Slurm's list or equal.
    """
    by_index = {str(gpu.index): gpu for gpu in gpus}
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        found = [by_index[i] for i in _numbers(env.get(name, "")) if i in by_index]
        if found:
            return found
    wanted = [part.strip() for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    found = [gpu for part in wanted for gpu in gpus if part == str(gpu.index) or gpu.uuid.startswith(part)]
    return found or list(gpus)


def _numbers(text: str) -> list[str]:
    """`0,2-3` as single numbers."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit():
            found += map(str, range(int(first), int(last) + 1))
        elif first.isdigit():
            found.append(first)
    return found


def complete_map(
    old: Sequence[Gpu], old_given: Sequence[str], new: Sequence[Gpu], new_given: Sequence[str]
) -> dict[str, str]:
    """UUIDs of every card that the processes saw, to those of this node; empty when all stay where they are.

    old_given, new_given: UUIDs of the job's own cards then and now, in the job's order: the n-th goes to the n-th. The
    driver wants the others named, too, although the job does not use them: each keeps its own, or gets one of the rest.
    Raises CudaMapImpossible when there are too few, or of another type.
    """
    names = {gpu.uuid: gpu.name for gpu in (*old, *new)}
    seen = [gpu.uuid for gpu in old]
    given = [uuid for uuid in old_given if uuid in seen]
    if len(new_given) < len(given):
        raise CudaMapImpossible(reason=f"the job had {len(given)} GPUs and has now {len(new_given)}")
    pairs = dict(zip(given, new_given, strict=False))
    left = [gpu.uuid for gpu in new if gpu.uuid not in pairs.values()]
    for uuid in (u for u in seen if u not in pairs):
        if not left:
            raise CudaMapImpossible(reason=f"the job saw {len(seen)} GPUs, this node has {len(new)}")
        pairs[uuid] = uuid if uuid in left else next((u for u in left if names[u] == names[uuid]), left[0])
        left.remove(pairs[uuid])
    for before, after in pairs.items():
        if names[before] != names[after]:
            raise CudaMapImpossible(reason=f"the job ran on {names[before]}, here is {names[after]}")
    return {} if all(before == after for before, after in pairs.items()) else pairs
