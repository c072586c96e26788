"""Questions to slurmctld, through `scontrol --json` with a data_parser version that 24.11 and 26.05 have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpucr_hpc.errors import JobUnknown, SlurmError, ToolFailed
from gpucr_hpc.proc import Result, clean_env, run_async

_PARSER = "--json=v0.0.42"
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class JobInfo:
    """What slurmctld says of a job. Times are seconds since 1970, 0 for never."""

    job: str
    uid: int
    states: frozenset[str]
    nodes: str
    node_count: int
    batch_host: str
    partition: str
    restarts: int
    preempt_time: int
    end_time: int
    excluded_nodes: str
    required_nodes: str
    cpus: int
    is_het: bool
    requeueable: bool

    @property
    def running(self) -> bool:
        return "RUNNING" in self.states and "COMPLETING" not in self.states

    @property
    def being_preempted(self) -> bool:
        """In the grace time of a preemption: Slurm will requeue it, whatever its processes do."""
        return self.running and self.preempt_time > 0

    @property
    def requeued(self) -> bool:
        """Requeued already, its processes are still to go."""
        return "PENDING" in self.states and "COMPLETING" in self.states


async def _scontrol(*args: str) -> Result:
    return await run_async(["scontrol", *args], timeout_s=_TIMEOUT_S, env=clean_env())


async def job(job_id: str) -> JobInfo:
    """Ask for one job; raise JobUnknown when slurmctld has no such job, SlurmError when it does not answer."""
    try:
        done = (await _scontrol("show", "job", job_id, _PARSER)).check()
    except ToolFailed as error:
        if "Invalid job id" in str(error):
            raise JobUnknown(job=job_id) from None
        raise SlurmError(reason=f"cannot ask for job {job_id}: {error}") from None
    return parse_job(job_id, done.stdout)


def parse_job(job_id: str, text: str) -> JobInfo:
    """JobInfo from the JSON text of `scontrol show job`."""
    try:
        jobs = json.loads(text)["jobs"]
    except (ValueError, KeyError, TypeError) as error:
        raise SlurmError(reason=f"unreadable answer about job {job_id}: {error}") from None
    for record in jobs:
        if str(record.get("job_id")) == job_id:
            return JobInfo(
                job=job_id,
                uid=int(record.get("user_id", -1)),
                states=frozenset(record.get("job_state", ())),
                nodes=record.get("nodes") or "",
                node_count=_number(record.get("node_count")),
                batch_host=record.get("batch_host") or "",
                partition=record.get("partition") or "",
                restarts=int(record.get("restart_cnt") or 0),
                preempt_time=_number(record.get("preempt_time")),
                end_time=_number(record.get("end_time")),
                excluded_nodes=record.get("excluded_nodes") or "",
                required_nodes=record.get("required_nodes") or "",
                cpus=_number(record.get("cpus")),
                is_het=_number(record.get("het_job_id")) > 0,
                requeueable=bool(record.get("requeue", False)),
            )
    raise JobUnknown(job=job_id)


def _number(value: Any) -> int:
    """data_parser writes numbers as {set, infinite, number}; older fields are plain."""
    if isinstance(value, dict):
        return int(value.get("number") or 0) if value.get("set") else 0
    return int(value or 0)


async def config() -> dict[str, str]:
    """slurm.conf as slurmctld has it, keys in lower case."""
    done = await _scontrol("show", "config")
    if done.status != 0:
        raise SlurmError(reason=f"cannot read the configuration: {done.stderr.strip()}")
    pairs = (line.partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


async def free_node_elsewhere(info: JobInfo, here: str) -> bool:
    """Whether a node other than `here`, in the job's partition, has room for the job at this moment."""
    done = await _scontrol("show", "nodes", _PARSER)
    if done.status != 0:
        return False
    for node in json.loads(done.stdout).get("nodes", []):
        states = set(node.get("state", ()))
        free = int(node.get("cpus", 0)) - int(node.get("alloc_cpus", 0))
        usable = states & {"IDLE", "MIXED"} and not states & {"DRAIN", "DOWN", "NOT_RESPONDING", "COMPLETING"}
        if (
            node.get("name") != here
            and usable
            and info.partition in node.get("partitions", [])
            and free >= info.cpus
        ):
            return True
    return False
