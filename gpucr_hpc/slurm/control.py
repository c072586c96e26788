"""Changes to jobs, through scontrol as root."""

from __future__ import annotations

import asyncio
import re

from gpucr_hpc.errors import JobUnknown, RequeueFailed, SlurmError
from gpucr_hpc.proc import clean_env, run_async
from gpucr_hpc.slurm import query

_TIMEOUT_S = 20.0
_AWAY_S = 15.0  # several scheduling cycles
_LOOK_S, _LONGEST_LOOK_S = 30.0, 600.0  # how often a job that runs elsewhere is looked at
_REQUEUE_DELAY_SINCE = (25, 11)


async def requeue(job_id: str) -> None:
    """Requeue a running batch job under its id; raise RequeueFailed with Slurm's reason."""
    if not (await _living(job_id)).requeued:
        await _requeue("requeue", job_id)


async def requeue_hold(job_id: str) -> None:
    """Requeue a job and hold it, so that nothing runs before somebody has looked."""
    await _living(job_id)
    await _requeue("requeuehold", job_id)


async def _living(job_id: str) -> query.JobInfo:
    """slurmctld would requeue a job that has ended, too, even after scancel: that must not bring it back."""
    info = await query.job(job_id)
    if not info.running and not info.requeued:
        raise RequeueFailed(job=job_id, reason=f"it is {' '.join(sorted(info.states))}")
    return info


async def _requeue(verb: str, job_id: str) -> None:
    done = await run_async(["scontrol", verb, job_id], timeout_s=_TIMEOUT_S, env=clean_env())
    if done.status == 0:
        return
    # The answer may be lost while the request was carried out: look again before calling it a failure.
    info = await query.job(job_id)
    if not info.requeued and "PENDING" not in info.states:
        raise RequeueFailed(job=job_id, reason=done.stderr.strip() or f"status {done.status}")


async def forgive(job_id: str, excluded: str, restarts: int) -> None:
    """Undo `keep_away` for a job that waits again: because it has not found another node, or because it has lost it,
    and the old one may be the only one free. Slurm takes no such change of a job that runs, so it is waited for.

    excluded: nodes that its user excluded. restarts: Slurm's count after the requeue that this belongs to; a job that
    has been moved again since waits away from other nodes, and is left alone.
    """
    await asyncio.sleep(_AWAY_S)
    info = await query.job(job_id)
    wish, pause_s = info.excluded_nodes, _LOOK_S
    if info.restarts != restarts:
        return
    while info.excluded_nodes == wish != excluded and not info.over:
        if "PENDING" in info.states:
            await run_async(
                ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded}"],
                timeout_s=_TIMEOUT_S,
                env=clean_env(),
            )
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        try:
            info = await query.job(job_id)
        except JobUnknown:
            return
        except SlurmError:
            continue  # it is away


async def keep_away(info: query.JobInfo, nodes: list[str], excluded: str, *, elsewhere: bool = True) -> None:
    """After a requeue: the same number of nodes, soon, and with `elsewhere` not these when enough others have room now.

    excluded: nodes that the user himself excludes; those of earlier moves come off the list again. Without
    `requeue_delay` (before 25.11) slurmctld lets a requeued job wait for two minutes unless its begin time lies in
    the future while it is still COMPLETING. Failures only cost time, so they are not raised.
    """
    changes = [f"NumNodes={len(nodes)}-{len(nodes)}"] if len(nodes) > 1 else []
    # A node that the user asks for and that is excluded would let the job wait for ever.
    away = elsewhere and not info.required_nodes and await query.enough_free_elsewhere(info, nodes)
    wanted = ",".join(filter(None, [excluded, *(nodes if away else [])]))
    if wanted != info.excluded_nodes:
        changes.append(f"ExcNodeList={wanted}")
    config = await query.config()
    version = tuple(int(n) for n in re.findall(r"\d+", config.get("slurm_version", ""))[:2])
    if version < _REQUEUE_DELAY_SINCE or "requeue_delay" not in config.get("schedulerparameters", ""):
        changes.append("StartTime=now+8")
    if changes:
        await run_async(["scontrol", "update", f"JobId={info.job}", *changes], timeout_s=_TIMEOUT_S, env=clean_env())


async def comment(job_id: str, text: str) -> None:
    """Put a line for administrators into the job's AdminComment; its failure costs nothing but that line."""
    await run_async(
        ["scontrol", "update", f"JobId={job_id}", f"AdminComment={text}"], timeout_s=_TIMEOUT_S, env=clean_env()
    )
