"""Nodes: what runs on them, taking them out of service and back."""

from __future__ import annotations

import json

from gpucr_hpc.errors import SlurmError
from gpucr_hpc.proc import Result, clean_env, run_async
from gpucr_hpc.slurm.query import PARSER, JobInfo, job_of

_TIMEOUT_S = 30.0


async def _run(*argv: str) -> Result:
    return await run_async(argv, timeout_s=_TIMEOUT_S, env=clean_env())


async def node_states(nodes: list[str]) -> dict[str, frozenset[str]]:
    """Slurm's states of nodes, such as IDLE and DRAIN; raise SlurmError for one that it does not know."""
    done = await _run("scontrol", "show", "node", ",".join(nodes), PARSER)
    try:
        records = json.loads(done.stdout)["nodes"] if done.status == 0 else []
    except (ValueError, KeyError):
        records = []
    found = {str(record["name"]): frozenset(record.get("state", ())) for record in records}
    for node in nodes:
        if node not in found:
            raise SlurmError(reason=f"no node {node}: {done.stderr.strip() or 'slurmctld does not know it'}")
    return found


async def all_nodes() -> list[str]:
    """Every node that can take jobs now: not down, powered off or drained."""
    done = await _run("scontrol", "show", "nodes", PARSER)
    if done.status != 0:
        raise SlurmError(reason=f"cannot ask for the nodes: {done.stderr.strip()}")
    out = {"DOWN", "DRAIN", "POWERED_DOWN", "NOT_RESPONDING", "FUTURE"}
    return [str(node["name"]) for node in json.loads(done.stdout)["nodes"] if not out & set(node.get("state", ()))]


async def jobs_on(nodes: list[str]) -> list[JobInfo]:
    """Jobs that have any of these nodes, those that are just leaving them included."""
    done = await _run("squeue", "--nodelist", ",".join(nodes), PARSER)
    if done.status != 0:
        raise SlurmError(reason=f"cannot ask for the jobs of {','.join(nodes)}: {done.stderr.strip()}")
    return [info for info in map(job_of, json.loads(done.stdout)["jobs"]) if info.nodes]


async def running_jobs() -> list[JobInfo]:
    """All jobs that run, of every user."""
    done = await _run("squeue", "--states", "RUNNING", PARSER)
    if done.status != 0:
        raise SlurmError(reason=f"cannot ask for the running jobs: {done.stderr.strip()}")
    return [info for info in map(job_of, json.loads(done.stdout)["jobs"]) if info.batch_host]


async def drain(nodes: list[str], reason: str) -> None:
    """Nothing new starts on these nodes; raise SlurmError, also without the right to do so."""
    await _update(nodes, "state=DRAIN", f"reason={reason}")


async def undrain(nodes: list[str]) -> None:
    """Undo `drain`."""
    await _update(nodes, "state=RESUME")


async def _update(nodes: list[str], *changes: str) -> None:
    done = await _run("scontrol", "update", f"nodename={','.join(nodes)}", *changes)
    if done.status != 0:
        raise SlurmError(reason=f"cannot change {','.join(nodes)}: {done.stderr.strip() or done.stdout.strip()}")
