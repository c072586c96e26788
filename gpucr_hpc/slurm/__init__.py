"""The only place that reads Slurm's output and changes jobs."""

from gpucr_hpc.slurm.control import forgive, keep_away, requeue, requeue_hold
from gpucr_hpc.slurm.query import JobInfo, config, enough_free_elsewhere, hostnames, job, node_addresses

__all__ = [
    "JobInfo",
    "config",
    "enough_free_elsewhere",
    "forgive",
    "hostnames",
    "job",
    "keep_away",
    "node_addresses",
    "requeue",
    "requeue_hold",
]
