"""What of a job outlives the agent: its journal, and how the next agent takes the job over."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import checkpointing, gpuword, nccl
from gpucr_hpc.agent.clock import Times
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.policy import Policy
from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.capsule import Capsule, discard
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.errors import GpucrError, SlurmError
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_SETTLE_AGAIN_S = 30.0


def state_of(job: ProtectedJob) -> dict[str, Any]:
    """What is written down of a job, JSON values only."""
    return {
        "job": job.job,
        "phase": job.phase,
        "uid": job.uid,
        "gid": job.gid,
        "groups": job.groups,
        "run": job.run,
        "node_rank": job.node_rank,
        "tasks": sorted(job.tasks),
        "geometry": None if job.geometry is None else dataclasses.asdict(job.geometry),
        "store_root": job.store_root,
        "capsule": None if job.capsule is None else dataclasses.asdict(job.capsule),
        "supervisor": job.batch,
        "excluded": job.excluded,
        "user_recipients": job.user_recipients,
        "script": job.script,
        "paths_of": job.paths_of,
        "shape": job.shape,
        "last": job.last,
        "gpu_word": job.gpu_word,
        "policy": job.policy.as_dict(),
        "times": job.times.as_dict(),
        "timeouts": job.timeouts,
        **job.steps.state(),
    }


async def adopt(job: ProtectedJob, state: dict[str, Any]) -> bool:
    """Take over a capsule that an earlier agent made; False when nothing of it is left to keep.

    A dump that was under way has been undone by CRIU itself, since it lost its hook and its stream; here
    we wait for its end and open the network again. A restore that was under way has ended one way or the other.
    """
    job.uid, job.gid, job.run = state["uid"], state["gid"], state["run"]
    job.groups, job.node_rank = tuple(state["groups"]), state["node_rank"]
    job.store_root, job.last = state["store_root"], state["last"]
    job.excluded, job.user_recipients = state["excluded"], state.get("user_recipients", "")
    job.script, job.paths_of = state.get("script", ""), state.get("paths_of", job.job)
    job.shape = state.get("shape", {})
    job.gpu_word = state.get("gpu_word", False)
    job.policy, job.times = Policy.from_dict(state.get("policy", {})), Times.from_dict(state.get("times", {}))
    job.timeouts = state.get("timeouts", 0)
    if state["geometry"]:
        job.geometry = Geometry(**{k: tuple(v) for k, v in state["geometry"].items()})
    job.capsule = Capsule(**state["capsule"] | {"groups": job.groups}) if state["capsule"] else None
    job.steps.adopt(state)
    phase = Phase(state["phase"])
    job.tasks, job.batch = set(state["tasks"]), state["supervisor"]
    if job.capsule is not None and not job.capsule.alive():
        job.capsule = None
    if job.capsule and (phase is Phase.REQUEUEING or job.node_rank != 0):
        phase = await _phase_by_slurm(job, phase)
    alone = job.geometry is not None and len(job.geometry.nodes) == 1
    if job.capsule and phase is Phase.RESTORING and alone and await checkpointing.restored(job.capsule):
        phase = Phase.RUNNING  # of several nodes all begin the restore once more: no part is of use alone
    gone = job.capsule is None or not job.capsule.alive() or not job.batch_lives()
    if gone or phase in (Phase.RESTORING, Phase.NEW, Phase.LEAVING):
        log.info("remains of a job removed", job=job.job, phase=phase)
        job.steps.stop()
        await discard(job.job, job.run_dir, job.capsule)
        job.capsule = None
        return False
    assert job.capsule is not None
    await _settle(job, job.capsule)
    job.set_phase(Phase.RUNNING)
    await job.steps.connect()
    for step in job.steps.steps.values():
        job.spawn(job.steps.watch(step))
    job.spawn(job.watch())
    job.spawn(job.watch_capsule())
    if job.node_rank == 0:
        job.spawn(gpuword.watch(job))
        if job.run_dir.quiet.exists():
            job.spawn(nccl.bring_back(job))
    log.info("job found again", job=job.job, init_pid=job.capsule.init_pid)
    return True


async def _settle(job: ProtectedJob, capsule: Capsule) -> None:
    """What is left of an earlier agent's work must not be the end of a job that lives: it is tried again and again."""
    try:
        await checkpointing.settle(capsule, job.run_dir, job.context.config.cuda)
        return
    except (GpucrError, OSError) as error:
        log.error("a checkpoint or restore is not cleaned up behind", job=job.job, error=str(error))
    try:
        await network.unlock(job.job)
    except (GpucrError, OSError) as error:
        log.error("network not opened", job=job.job, error=str(error))

    async def again() -> None:
        await asyncio.sleep(_SETTLE_AGAIN_S)
        if job.capsule is capsule and job.phase is Phase.RUNNING and capsule.alive():
            await _settle(job, capsule)

    job.spawn(again())


async def _phase_by_slurm(job: ProtectedJob, phase: Phase) -> Phase:
    try:
        info = await slurm.job(job.job)
    except SlurmError as error:
        log.warning("slurmctld does not answer, job kept", job=job.job, error=str(error))
        return Phase.RUNNING
    if not info.running or info.restarts > job.run:
        return Phase.LEAVING
    return Phase.RUNNING if phase is Phase.REQUEUEING else phase
