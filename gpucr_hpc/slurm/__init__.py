"""The only place that reads Slurm's output and changes jobs."""

from gpucr_hpc.slurm.control import keep_away, requeue, requeue_hold
from gpucr_hpc.slurm.query import JobInfo, config, free_node_elsewhere, job

__all__ = ["JobInfo", "config", "free_node_elsewhere", "job", "keep_away", "requeue", "requeue_hold"]
