"""What `gpucr status` shows of a job."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

#: Where a program in a job may write how far it is; its own /tmp, so it travels with the job.
PROGRESS_FILE = "/tmp/gpucr-progress"  # noqa: S108 - inside the capsule
_LINE_BYTES = 200


@dataclass(frozen=True)
class Progress:
    """How far a job is by its own word. left_s: seconds, None when it cannot be told yet."""

    done: float
    total: float
    left_s: float | None

    def as_dict(self) -> dict[str, Any]:
        percent = round(100 * self.done / self.total, 2)
        return {"done": self.done, "total": self.total, "percent": percent, "left_s": self.left_s}


def parse_progress(line: str, sample: tuple[float, float] | None, now: float) -> Progress | None:
    """Progress from the line `DONE TOTAL [SECONDS_LEFT]`, or None when it is none.

    sample: an earlier moment (seconds) and what was done then, from which the time left follows when the line has none.
    """
    words = line.split()
    try:
        done, total, *more = (float(word) for word in words[:3])
    except ValueError:
        return None
    if not (0 <= done <= total < float("inf")) or total == 0 or len(words) < 2:
        return None
    left = more[0] if more else None
    if left is None and sample is not None and done > sample[1] and now > sample[0]:
        left = (total - done) * (now - sample[0]) / (done - sample[1])
    return Progress(done, total, None if left is None or not 0 <= left < float("inf") else round(left, 1))


def read_line(path: str) -> str | None:
    """The first line of a small file that a user wrote; nothing else than a regular file is read, and no link
    followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        return file.read(_LINE_BYTES).decode(errors="replace").partition("\n")[0]


async def of_job(job: ProtectedJob) -> dict[str, Any]:
    """The table of one job; keys may be added, never changed."""
    geometry, now = job.geometry, time.time()
    table: dict[str, Any] = {
        "job": job.job,
        "uid": job.uid,
        "phase": job.phase,
        "run": job.run,
        "node_rank": job.node_rank,
        "nodes": list(geometry.nodes) if geometry else [],
        "interval_s": job.policy.interval_s,
        "timeouts": job.timeouts,
        "last": job.last,
        "progress": job.dump_progress(),
        "own_progress": None,
    }
    if job.capsule is not None:
        # In a thread: the capsule's /tmp is memory, but a user might put something slow there.
        line = await asyncio.to_thread(read_line, str(job.capsule.inside(PROGRESS_FILE)))
        progress = parse_progress(line or "", job.sample, now)
        if progress is not None:
            if job.sample is None or progress.done < job.sample[1]:
                job.sample = (now, progress.done)
            table["own_progress"] = progress.as_dict()
    return table
