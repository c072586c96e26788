"""Placing a process in another's control groups, on v1, hybrid and v2 hosts.

Paths are read from /proc, never built: Slurm names its directories by job id or by SLUID, depending on its
version and settings.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from gpucr_hpc.errors import HostError

_STEP = re.compile(r"/job_([^/]+)/step_")


def memberships(pid: int) -> dict[str, str]:
    """Controllers (as /proc/PID/cgroup writes them, "" for v2) to path."""
    pairs = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        pairs[controllers] = path
    return pairs


def slurm_job(pid: int) -> str:
    """The job, by its id or SLUID, for a step of which slurmd made a control group that a process is in; empty without
    one. Slurm's own word: no process gets into a group of another user's job."""
    found = (_STEP.search(path) for path in memberships(pid).values() if "slurm" in path)
    return next((match[1] for match in found if match), "")


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
