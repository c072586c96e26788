"""Placing a process in another's control groups, on v1, hybrid and v2 hosts.

Paths are read from /proc, never built: Slurm names its directories by job id or by SLUID, depending on its
version and settings.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpucr_hpc.errors import HostError


def memberships(pid: int) -> dict[str, str]:
    """Controllers (as /proc/PID/cgroup writes them, "" for v2) to path."""
    pairs = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        pairs[controllers] = path
    return pairs


def in_slurm_job(pid: int) -> bool:
    """Whether a process is in a control group that slurmd made for a step."""
    return any("slurm" in path and "/step_" in path for path in memberships(pid).values())


def mount_point(controllers: str) -> Path | None:
    """Where the hierarchy with these controllers ("" for v2) is mounted, or None."""
    wanted = set(controllers.split(",")) if controllers else set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _source, options = after.split(" ", 2)
        if (kind == "cgroup2" and not wanted) or (kind == "cgroup" and wanted and wanted <= set(options.split(","))):
            return Path(before.split()[4])
    return None


def place(pid: int, like: int) -> None:
    """Move process `pid` into every control group in which process `like` is.

    Raises HostError when a group of Slurm's cannot be entered: its limits would not hold.
    """
    for controllers, path in memberships(like).items():
        point = mount_point(controllers)
        if point is None:
            continue
        procs = point / path.lstrip("/") / "cgroup.procs"
        try:
            procs.write_text(str(pid))
        except OSError as error:
            if "slurm" in path:
                raise HostError(reason=f"cannot move pid {pid} to {procs}: {error.strerror}") from None


def bind(pid: int, like: int) -> None:
    """Let every thread of `pid` run on the processors that `like` may use. CRIU keeps no affinity: what it brings
    back would run everywhere."""
    processors = os.sched_getaffinity(like)
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), processors)
