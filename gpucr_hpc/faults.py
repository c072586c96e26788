"""Fault points: numbered places of a checkpoint and a restore where a test stops the agent, kills it or lets it fail.

They do nothing unless the agent was started with GPUCR_FAULTS in its environment: a directory in which the file JOB
holds a point's name and an action, such as `after commit kill`. The file is removed before the action: it happens once.
docs/architecture.md has the same table.
"""

from __future__ import annotations

import asyncio
import os
import signal
from enum import Enum
from pathlib import Path

from gpucr_hpc.errors import GpucrError

VARIABLE = "GPUCR_FAULTS"
_LOOK_INTERVAL_S = 0.02


class Point(Enum):
    """number, name, on which agents ("lead": the first node's; "each": every node's), and what holds there."""

    PREPARED = (1, "after prepare", "lead", "every node has passed its checks, workers wait; nothing is touched")
    QUIET = (13, "after quiesce", "lead", "NCCL's communicators are gone, at a common cut (jobs whose NCCL is rebuilt)")
    GPUS_HELD = (2, "after gpu_lock", "lead", "work on every GPU has come to rest")
    LOCKED = (3, "after lock", "lead", "shepherds are detached, no packet passes")
    GPUS_SAVED = (4, "gpu checkpointed", "each", "GPU memory is in host memory (jobs with GPUs)")
    CRIU_STARTED = (5, "criu started", "each", "CRIU is about to freeze the tree")
    FROZEN = (6, "frozen", "each", "the tree is frozen, its pages are read")
    CAPTURED = (7, "after capture", "lead", "every tree is frozen, every image whole or, if the job goes on, read")
    COMMITTED = (8, "after commit", "lead", "the manifest is there; Slurm knows nothing")
    MARKED = (9, "marked", "each", "the node knows that the job will leave")
    REQUEUED = (10, "after requeue", "lead", "Slurm has requeued the job; its trees are frozen")
    ENDED = (11, "ended", "each", "the tree is ended, its supervisors are not released")
    RESUMED = (12, "after resume", "lead", "every tree of a job that goes on runs again; no image is whole")
    CHECKED = (21, "before restore", "each", "host and image are checked, files rolled back; there is no capsule")
    BUILT = (22, "after build", "each", "the capsule is there, its network locked")
    STEPS_STARTED = (23, "steps started", "lead", "the steps' sruns are started again")
    RESTORED = (24, "after restore", "each", "the tree runs, its network locked")
    GPUS_RESTORED = (25, "after gpu restore", "each", "GPU memory is back (jobs with GPUs)")
    ALL_RESTORED = (26, "all restored", "lead", "every node has its tree; all networks are locked")
    UNLOCKED = (27, "after unlock", "each", "this node's network is open, its supervisors are not attached")

    def __init__(self, number: int, label: str, where: str, state: str) -> None:
        self.number, self.label, self.where, self.state = number, label, where, state


async def reach(point: Point, job: str) -> None:
    """Act if this point is armed for this job.

    `kill` ends this process as SIGKILL does; `fail` raises GpucrError; `stop` writes the point's name into JOB.at and
    waits until somebody has removed that file, all else going on.
    """
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    order, stopped = Path(directory, job), Path(directory, f"{job}.at")
    try:
        label, _, action = order.read_text().strip().rpartition(" ")
        if label != point.label:
            return
        order.unlink()
    except FileNotFoundError:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "fail":
        raise GpucrError(reason=f"fault point {point.number}, {label}")
    elif action == "stop":
        stopped.write_text(label)
        try:
            while stopped.exists():
                await asyncio.sleep(_LOOK_INTERVAL_S)
        finally:
            stopped.unlink(missing_ok=True)
    else:
        raise ValueError(f"fault point {label}: unknown action {action!r}")
