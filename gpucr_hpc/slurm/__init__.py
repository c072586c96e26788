"""The only place that reads Slurm's output and changes jobs and nodes."""

from gpucr_hpc.slurm.control import comment, forgive, keep_away, requeue, requeue_hold
from gpucr_hpc.slurm.nodes import all_nodes, drain, jobs_on, node_states, running_jobs, undrain
from gpucr_hpc.slurm.query import (
    JobInfo,
    config,
    enough_free_elsewhere,
    host_list,
    hostnames,
    job,
    node_addresses,
    partitions,
    plain_id,
)

__all__ = [
    "JobInfo",
    "all_nodes",
    "comment",
    "config",
    "drain",
    "enough_free_elsewhere",
    "forgive",
    "host_list",
    "hostnames",
    "job",
    "jobs_on",
    "keep_away",
    "node_addresses",
    "node_states",
    "partitions",
    "plain_id",
    "requeue",
    "requeue_hold",
    "running_jobs",
    "undrain",
]
