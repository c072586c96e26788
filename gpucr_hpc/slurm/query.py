"""Questions to slurmctld, through `scontrol --json` with a data_parser version that 24.11 and 26.05 have."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import dataclass
from typing import Any

from gpucr_hpc.errors import JobUnknown, SlurmError, ToolFailed
from gpucr_hpc.proc import Result, clean_env, run_async

PARSER = "--json=v0.0.42"
_TIMEOUT_S = 20.0
_ELEMENT = re.compile(r"(\d+)_(\d+)", re.ASCII)
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


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
    tasks: int
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
    def over(self) -> bool:
        """It has ended and will not run again under this id."""
        return bool(self.states) and self.states <= _ENDED

    @property
    def requeued(self) -> bool:
        """Requeued already, its processes are still to go."""
        return "PENDING" in self.states and "COMPLETING" in self.states


async def _scontrol(*args: str) -> Result:
    return await run_async(["scontrol", *args], timeout_s=_TIMEOUT_S, env=clean_env())


async def job(job_id: str) -> JobInfo:
    """Ask for one job; raise JobUnknown when slurmctld has no such job, SlurmError when it does not answer."""
    try:
        done = (await _scontrol("show", "job", job_id, PARSER)).check()
    except ToolFailed as error:
        if "Invalid job id" in str(error):
            raise JobUnknown(job=job_id) from None
        raise SlurmError(reason=f"cannot ask for job {job_id}: {error}") from None
    return parse_job(job_id, done.stdout)


async def plain_id(text: str) -> str:
    """The job id of an array's element as squeue shows it, such as 12_7; other text as it is.

    Raises JobUnknown, also for an element that waits with others, SlurmError.
    """
    found = _ELEMENT.fullmatch(text)
    if found is None:
        return text
    done = await _scontrol("show", "job", text, PARSER)
    if done.status != 0 and "Invalid job id" not in done.stderr:
        raise SlurmError(reason=f"cannot ask for job {text}: {done.stderr.strip()}")
    return parse_element(int(found[1]), int(found[2]), done.stdout)


def parse_element(array: int, task: int, text: str) -> str:
    """Job id of an array's element from the JSON text of `scontrol show job`."""
    try:
        jobs = json.loads(text)["jobs"]
    except (ValueError, KeyError, TypeError):
        jobs = []
    for record in jobs:
        element = record.get("array_task_id") or {}
        if _number(record.get("array_job_id")) == array and element.get("set") and _number(element) == task:
            return str(record["job_id"])
    raise JobUnknown(job=f"{array}_{task}")


def parse_job(job_id: str, text: str) -> JobInfo:
    """JobInfo from the JSON text of `scontrol show job`."""
    try:
        jobs = json.loads(text)["jobs"]
    except (ValueError, KeyError, TypeError) as error:
        raise SlurmError(reason=f"unreadable answer about job {job_id}: {error}") from None
    for record in jobs:
        if str(record.get("job_id")) == job_id:
            return job_of(record)
    raise JobUnknown(job=job_id)


def job_of(record: dict[str, Any]) -> JobInfo:
    """JobInfo from one job of Slurm's JSON."""
    return JobInfo(
        job=str(record["job_id"]),
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
        tasks=_number(record.get("tasks")),
        is_het=_number(record.get("het_job_id")) > 0,
        requeueable=bool(record.get("requeue", False)),
    )


def _number(value: Any) -> int:
    """data_parser writes numbers as {set, infinite, number}; older fields are plain."""
    if isinstance(value, dict):
        return int(value.get("number") or 0) if value.get("set") else 0
    return int(value or 0)


async def hostnames(text: str) -> list[str]:
    """The names of a host list such as "n[1-3,7]", in its order."""
    done = await _scontrol("show", "hostnames", text)
    if done.status != 0:
        raise SlurmError(reason=f"cannot expand {text!r}: {done.stderr.strip()}")
    return done.stdout.split()


async def host_list(nodes: list[str]) -> str:
    """The short form of names, such as "n[1-3,7]"."""
    done = await _scontrol("show", "hostlistsorted", ",".join(nodes))
    return done.stdout.strip() if done.status == 0 else ",".join(nodes)


async def node_addresses(nodes: list[str]) -> list[str]:
    """IPv4 addresses of nodes as Slurm knows them, in the order asked; raise SlurmError for one without."""
    done = await _scontrol("show", "node", ",".join(nodes), PARSER)
    if done.status != 0:
        raise SlurmError(reason=f"cannot ask for nodes {','.join(nodes)}: {done.stderr.strip()}")
    known = {n.get("name"): n.get("address") or n.get("hostname") for n in json.loads(done.stdout)["nodes"]}
    found = []
    for node in nodes:
        try:
            resolved = await asyncio.get_running_loop().getaddrinfo(
                known[node], None, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
        except (KeyError, OSError) as error:
            raise SlurmError(reason=f"node {node} has no IPv4 address: {error}") from None
        found.append(str(resolved[0][4][0]))
    return found


async def config() -> dict[str, str]:
    """slurm.conf as slurmctld has it, keys in lower case."""
    done = await _scontrol("show", "config")
    if done.status != 0:
        raise SlurmError(reason=f"cannot read the configuration: {done.stderr.strip()}")
    pairs = (line.partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


async def partitions() -> list[dict[str, str]]:
    """Partitions as slurmctld has them, keys in lower case."""
    done = await _scontrol("show", "partition", "--oneliner")
    if done.status != 0:
        raise SlurmError(reason=f"cannot read the partitions: {done.stderr.strip()}")
    words = ((word.partition("=") for word in line.split() if "=" in word) for line in done.stdout.splitlines())
    return [{key.lower(): value for key, _, value in line} for line in words]


async def enough_free_elsewhere(info: JobInfo, here: list[str]) -> bool:
    """Whether as many nodes as the job has, other than these, have room for their part of it at this moment."""
    done = await _scontrol("show", "nodes", PARSER)
    if done.status != 0:
        return False
    cpus_per_node = -(-info.cpus // len(here))
    fitting = 0
    for node in json.loads(done.stdout).get("nodes", []):
        states = set(node.get("state", ()))
        free = int(node.get("cpus", 0)) - int(node.get("alloc_cpus", 0))
        usable = states & {"IDLE", "MIXED"} and not states & {"DRAIN", "DOWN", "NOT_RESPONDING", "COMPLETING"}
        in_partition = info.partition in node.get("partitions", [])
        if node.get("name") not in here and usable and in_partition and free >= cpus_per_node:
            fitting += 1
    return fitting >= len(here)
