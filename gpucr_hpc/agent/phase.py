"""What is happening to a job, and what a signal of Slurm's means for it."""

from __future__ import annotations

import enum

from gpucr_hpc import slurm


class Phase(enum.StrEnum):
    """What is happening to a job's capsule on this node."""

    NEW = "new"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    SEALING = "sealing"  # it runs, and its checkpoint is being written
    REQUEUEING = "requeueing"
    LEAVING = "leaving"
    RESTORING = "restoring"


#: Phases in which the job's tasks run.
AT_WORK = (Phase.RUNNING, Phase.SEALING)


class Decision(enum.StrEnum):
    """What a signal of Slurm's to the supervisor means."""

    REQUEUE = "checkpoint, then requeue"
    LEAVE = "checkpoint, requeued already"
    FORWARD = "forward to the task"
    IGNORE = "nothing"


def decide(info: slurm.JobInfo, signal: int, notice_signal: int) -> Decision:
    """What to do about a signal, from what slurmctld says of the job.

    notice_signal: our own real-time signal, 0 when the user's --signal took its place.
    """
    if info.being_preempted:
        return Decision.REQUEUE
    if info.requeued:
        return Decision.LEAVE
    if info.running and signal == notice_signal:
        return Decision.IGNORE  # it also comes near the time limit
    return Decision.FORWARD
