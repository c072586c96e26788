"""The store, as its account sees it from this node, for `gpucr doctor`."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucr_hpc.config import StoreConfig
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.units import format_bytes

#: What is looked at, whether it is good, what was found, what to do otherwise.
Line = tuple[str, bool, str, str]

_LEAST_BYTES = 1 << 30


def judge(config: StoreConfig, probe: Mapping[str, Any]) -> list[Line]:
    """Lines from what a trial in the store has shown; probe: as Worker.do_probe made it, with root and free_bytes."""
    detail = (
        f"{probe['root']} ({file_system(probe['root'])}): {format_bytes(probe['free_bytes'])} free, "
        f"{probe['seconds']:.3f} s for a synced write, {format_bytes(int(probe['bytes_per_s']))}/s"
    )
    advice = "make room, or raise the quota   # otherwise checkpoints are refused, and jobs go on from older ones"
    found: list[Line] = [("store", probe["free_bytes"] >= _LEAST_BYTES, detail, advice)]
    owner, wanted = _name(probe["owner"]), config.user
    advice = (
        f'user = "ACCOUNT" in [store], who owns {config.root}   # otherwise checkpoints belong to {owner}, and others '
        "who are made that one by the file system can alter them"
    )
    found.append(("store", owner == wanted, f"written as {wanted}, files belong to {owner}", advice))
    advice = "use a file system that has them   # otherwise every checkpoint is written in full"
    found.append(("store", probe["links"], f"hard links: {'yes' if probe['links'] else 'no'}", advice))
    if Path(config.root).parts[:2] == ("/", "var"):
        advice = (
            'root = "/DIRECTORY" in [store], of the parallel file system that every node mounts   # otherwise no job '
            "comes back on another node"
        )
        found.append(("store", False, f"{config.root} looks local to this node", advice))
    return found


def refused(config: StoreConfig, error: GpucrError) -> tuple[str, str]:
    """What was found and what to do when nothing can be written."""
    if config.user == "root":
        advice = f'user = "ACCOUNT" in [store], who owns {config.root}: root is squashed on most parallel file systems'
    else:
        advice = f"install -d -o {config.user} -m 700 {config.root}"
    return str(error), f"{advice}   # otherwise no job can be protected"


def file_system(path: str) -> str:
    """Kind of the file system that a directory is on, such as lustre or nfs4."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if Path(path).is_relative_to(point) and point.is_relative_to(best):
            best, kind = point, after.split()[0]
    return kind


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
