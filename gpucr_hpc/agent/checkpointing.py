"""A checkpoint of a protected job, from the order to the report."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.participant import LocalParticipant
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule import Capsule, RunDir, namespace_processes, network
from gpucr_hpc.coordinator.checkpoint import Budget, Timings
from gpucr_hpc.coordinator.checkpoint import checkpoint as coordinate
from gpucr_hpc.engine.dump import remove_link_remaps
from gpucr_hpc.errors import CapsuleError, GpucrError
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.log import Log
from gpucr_hpc.model import ImageEntry, Manifest, new_checkpoint_id
from gpucr_hpc.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_REQUEUED_BUDGET_S = 20.0  # Slurm's KillWait is 30 s by default; some of it is gone when we learn of it
_SETTLE_LIMIT_S = 60.0


def budget_s(info: slurm.JobInfo | None, leave: bool, longest_s: float) -> float:
    """Seconds that a checkpoint may take before Slurm kills the job, and never more than longest_s."""
    if not leave or info is None:
        return longest_s
    if info.requeued:
        return min(_REQUEUED_BUDGET_S, longest_s)
    if info.being_preempted and info.end_time:
        return min(max(1.0, info.end_time - time.time()), longest_s)
    return longest_s


async def checkpoint(
    job: ProtectedJob, reason: str, *, leave: bool, info: slurm.JobInfo | None, since: float | None = None
) -> dict[str, Any]:
    """Take the checkpoint and, with leave, move the job away. Raises after everything is undone.

    since: monotonic clock when the signal came that asked for it, for the report; None means now.
    """
    assert job.capsule is not None
    began, capsule, context = time.time(), job.capsule, job.context
    ordered = time.monotonic() if since is None else since
    timings = Timings()
    checkpoint_id, key = new_checkpoint_id(), DataKey.generate()
    budget = Budget(job.job, budget_s(info, leave, context.config.engine.dump_timeout_s))
    worker = job.worker()
    participant = LocalParticipant(
        context,
        capsule,
        job.run_dir,
        worker,
        checkpoint=checkpoint_id,
        data_key=key.reveal_hex(),
        leave_running=not leave,
    )
    catalog = Catalog(context, worker, job.store_root)

    async def publish() -> None:
        spans = {
            "signal_to_frozen_s": round(participant.frozen_at - ordered, 4),
            "dump_s": round(participant.dump_s, 4),
        }
        manifest = Manifest(
            checkpoint=checkpoint_id,
            job=job.job,
            uid=job.uid,
            gid=job.gid,
            reason=reason,
            run=job.run,
            images=[ImageEntry.from_dict(participant.entry)],
            slots=[key.wrap(context.site_key, checkpoint_id)],
            meta=participant.meta | {"phases_s": timings.phases, "began": began, **spans},
        )
        data = manifest_file.encode(manifest, context.signing_key)
        await worker.call("publish", manifest=base64.b64encode(data).decode())
        await catalog.note_latest(job.job, checkpoint_id)
        job.last = {
            "checkpoint": checkpoint_id,
            "job": job.job,
            "node": context.node,
            "reason": reason,
            "began": began,
            "bytes_plain": manifest.bytes_plain,
            "bytes_stored": manifest.bytes_stored,
            **spans,
        }

    async def requeue() -> None:
        job.run_dir.leaving.touch()
        job.set_phase(Phase.REQUEUEING)
        if info is None or not info.requeued:
            await slurm.requeue(job.job)

    job.set_phase(Phase.CHECKPOINTING)
    log.info("checkpoint begins", job=job.job, checkpoint=checkpoint_id, reason=reason, budget_s=budget.limit_s)
    try:
        await coordinate(
            [participant], budget, publish=publish, leave=requeue if leave else None, timings=timings
        )
    except BaseException as error:
        await _go_on(job, participant, f"checkpoint not possible, the job runs on: {error}")
        raise
    finally:
        job.last |= {"phases_s": timings.phases}
        await _close(job, worker, catalog, checkpoint_id)
    report = dict(job.last) | {"total_s": round(time.time() - began, 4)}
    log.info("checkpoint committed", **{k: v for k, v in report.items() if k != "phases_s"}, **timings.phases)
    text = (
        f"checkpoint {checkpoint_id} written in {format_duration(report['total_s'])}: "
        f"{format_bytes(report['bytes_plain'])}, {format_bytes(report['bytes_stored'])} stored"
    )
    if leave:
        await _leave(job, f"{text}; the job leaves {context.node}", info)
    else:
        await _go_on(job, participant, text)
    return report


async def _close(job: ProtectedJob, worker: Any, catalog: Catalog, checkpoint_id: str) -> None:
    """End the worker; sets beyond the number to keep are removed first when a new one was committed."""
    try:
        if job.last.get("checkpoint") == checkpoint_id:
            await catalog.prune(job.job, job.context.config.store.keep_last)
    except GpucrError as error:
        log.warning("old checkpoints not removed", job=job.job, error=str(error))
    finally:
        await worker.close()


async def _go_on(job: ProtectedJob, participant: LocalParticipant, message: str) -> None:
    """The job stays: its supervisors take its output again."""
    if job.capsule is None or not job.capsule.alive():
        job.phase = Phase.RUNNING  # until its supervisors have seen the end
        if not job.supervisors:
            await job.discard()
        return
    job.run_dir.leaving.unlink(missing_ok=True)
    job.set_phase(Phase.RUNNING)
    for supervisor in list(job.supervisors.values()):
        if participant.detached:
            await supervisor.attach(job.run_dir.shepherd_socket, message)
        else:
            await supervisor.print(message)
    if not job.supervisors:
        job.spawn(job.watch())


async def _leave(job: ProtectedJob, message: str, info: slurm.JobInfo | None) -> None:
    """After commit and requeue: nothing of the job stays here, and Slurm gets the node back early."""
    job.set_phase(Phase.LEAVING)
    try:
        await slurm.keep_away(info or await slurm.job(job.job), job.context.node, job.excluded)
    except GpucrError as error:
        log.warning("no wish for another node", job=job.job, error=str(error))
    for supervisor in list(job.supervisors.values()):
        await supervisor.release(message)
    await job.discard()


async def settle(capsule: Capsule, run_dir: RunDir) -> None:
    """Wait until a CRIU that an earlier agent had started in a capsule is gone, and clean up behind it."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    run_dir.leaving.unlink(missing_ok=True)
    while any(p.name in ("criu", "gpucr-hook") for p in namespace_processes(capsule.init_pid)):
        if time.monotonic() > deadline:
            raise CapsuleError(job=capsule.job, node="this node", reason="an earlier CRIU does not end")
        await asyncio.sleep(0.05)
    remove_link_remaps(capsule)
    await network.unlock(capsule.job)


async def restored(capsule: Capsule) -> bool:
    """Wait until a restore that an earlier agent had begun ends: whether the whole tree runs.

    The holder takes the user's identity last of all; when CRIU fails the holder dies, and the capsule with it.
    """
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while capsule.alive() and time.monotonic() < deadline:
        if any(p.nspid == capsule.root and p.uid == capsule.uid for p in namespace_processes(capsule.init_pid)):
            return True
        await asyncio.sleep(0.05)
    return False
