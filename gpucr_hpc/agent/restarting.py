"""A job that Slurm has started again: go on from its newest good checkpoint, or say why not."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import cloning, lead, nccl
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.metrics import METRICS
from gpucr_hpc.agent.noderestore import NodeRestore
from gpucr_hpc.agent.peers import Peer
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import (
    CoordinationError,
    GpucrError,
    ImageError,
    JobUnknown,
    KeyFileError,
    PermissionRefused,
    Refused,
    RequeueFailed,
    RestoreFailed,
    RunOver,
    SlurmError,
    StoreError,
    WrongKey,
)
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest, rfc3339
from gpucr_hpc.store.retention import time_of
from gpucr_hpc.units import format_duration

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

HELD_EXIT_CODE = 125
_AGAINST_SET = (ImageError, StoreError, KeyFileError, WrongKey)
_PERSIST_S = 120.0
_PAUSE_S = 2.0
_UNDO_LIMIT_S = 20.0


async def restart(job: ProtectedJob, supervisor: Supervisor, info: slurm.JobInfo) -> None:
    """Decide how a restarted job goes on, and let it. Raises what keeps a good checkpoint from coming back."""
    async with job.worker() as worker:
        catalog = Catalog(job.context, worker, job.store_root)
        ended = await catalog.ended_before(job.job, job.run)
        if ended is not None:
            code = lead.exit_code(ended)
            text = f"the job ended by itself with status {code} while it was being preempted; it is not run again"
            await supervisor.refuse(text, code)
            return
        job.excluded = await catalog.excluded(job.job)
        candidates, problems = await catalog.candidates(job.job, job.uid)
        left = await catalog.left_with(job.job)
    if job.policy.restore_from and not candidates and not problems:
        await cloning.restore(job, supervisor, info)
        return
    for manifest in candidates:
        try:
            await persist(job, supervisor, manifest, info, ran_on=manifest.checkpoint != left, problems=problems)
            return
        except _AGAINST_SET as error:
            problems.append(f"checkpoint {manifest.checkpoint} is not used: {error}")
        except GpucrError as error:
            # Nothing speaks against the set: an older one would lose work and most likely fail alike.
            await _tell(job, supervisor, problems)
            if isinstance(error, Refused | PermissionRefused):  # of a job that begins: it may run without protection
                raise RestoreFailed(reason=str(error), log="the agent's journal") from None
            raise
    await _tell(job, supervisor, problems)
    if problems:
        raise RestoreFailed(reason=problems[-1], log="the agent's journal")
    await lead.start(job, supervisor, info, "no checkpoint was made yet, the job starts from its beginning")


async def persist(
    job: ProtectedJob,
    supervisor: Supervisor,
    manifest: Manifest,
    info: slurm.JobInfo,
    *,
    problems: list[str],
    ran_on: bool = False,
    outputs: Sequence[dict[str, Any]] = (),
) -> None:
    """Restore; problems, outputs: as in _restore.

    When another node's agent is lost or a step does not start, undo everything and try again for a while:
    agents are started anew. A node that is gone for good makes Slurm requeue the job."""
    deadline = time.monotonic() + _PERSIST_S
    while True:
        try:
            await _restore(job, supervisor, manifest, info, ran_on=ran_on, outputs=outputs, problems=problems)
            return
        except (CoordinationError, SlurmError) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("restore is tried again", job=job.job, error=str(error))
            await supervisor.print(f"not restored yet, it is tried again: {error}")
        await asyncio.sleep(_PAUSE_S)
        await still_ours(job, supervisor)


async def ask(job: ProtectedJob, supervisor: Supervisor) -> slurm.JobInfo:
    """What slurmctld says of the job, asked for as long as it does not answer; raise RunOver when it does not know the
    job any more, or the supervisor is gone."""
    told = False
    while True:
        if not supervisor.lives():
            raise RunOver(job=job.job, run=job.run)
        try:
            return await slurm.job(job.job)
        except JobUnknown:
            raise RunOver(job=job.job, run=job.run) from None
        except SlurmError as error:
            log.warning("slurmctld does not answer, it is asked again", job=job.job, error=str(error))
            if not told:
                await supervisor.print("slurmctld does not answer; the job waits for it")
            told = True
        await asyncio.sleep(_PAUSE_S)


async def still_ours(job: ProtectedJob, supervisor: Supervisor) -> None:
    """Raise RunOver when this run of the job is not the one that Slurm has running."""
    info = await ask(job, supervisor)
    if not info.running or info.restarts > job.run:
        raise RunOver(job=job.job, run=job.run)


async def _tell(job: ProtectedJob, supervisor: Supervisor, lines: list[str]) -> None:
    for line in lines:
        log.warning("restart", job=job.job, text=line)
        await supervisor.print(line)


class RemoteRestore:
    """Another node's part, over one connection: when that ends early, the node undoes by itself."""

    def __init__(self, job: ProtectedJob, rank: int, peer: Peer, of: str, manifest: bytes, *, ran_on: bool) -> None:
        self._job, self._rank, self._peer = job, rank, peer
        self._of, self._manifest, self._ran_on = of, manifest, ran_on
        self._open = False

    async def build(self) -> None:
        await self._peer.call(
            "restore_build",
            job=self._job.job,
            node_rank=self._rank,
            manifest=base64.b64encode(self._manifest).decode(),
            of=self._of,
            ran_on=self._ran_on,
            **lead.member_fields(self._job),
        )

    async def run(self) -> None:
        await self._peer.call("restore_run", job=self._job.job)

    async def open(self, _message: str) -> None:
        self._open = True
        await self._peer.call("restore_open", job=self._job.job)

    async def undo(self) -> None:
        if self._open:  # to the node the restore is over
            await self._peer.end("discard", _UNDO_LIMIT_S, job=self._job.job, run=self._job.run)
        else:
            self._peer.close()

    async def close(self) -> None:
        self._peer.close()


async def _restore(
    job: ProtectedJob,
    supervisor: Supervisor,
    manifest: Manifest,
    info: slurm.JobInfo,
    *,
    ran_on: bool,
    outputs: Sequence[dict[str, Any]],
    problems: list[str],
) -> None:
    """Bring every node's part back. Barriers: all built, all trees restored with their networks locked, all open.

    outputs: output files of this job as they were before the set came, when that is another job's. problems: of newer
    checkpoints, and other lines; printed when the output has been rolled back, and before anything more comes.
    """
    start, context = time.monotonic(), job.context
    own = manifest.job == job.job
    job.timeouts = manifest.meta.get("timeouts", 0) if own else 0
    job.geometry = await lead.geometry_of(info, tuple(manifest.meta["names"]))
    local = NodeRestore(job, manifest, ran_on=ran_on, outputs=outputs)
    parts: list[NodeRestore | RemoteRestore] = [local]
    try:
        for rank, peer in enumerate(await context.connector.open_all(job.job, job.geometry.others), 1):
            signed = manifest_file.encode(manifest.of_node(rank), context.signing_key)
            parts.append(RemoteRestore(job, rank, peer, manifest.job, signed, ran_on=ran_on))
        await _all(part.build() for part in parts)
        await _tell(job, supervisor, [*problems, *local.report])
        problems.clear()
        local.report.clear()
        # From now on the job writes more than this set knows: it is the latest, and not one that the job left with.
        if own:
            await Catalog(context, local.worker, job.store_root).note_latest(job.job, manifest.checkpoint)
        await job.steps.relaunch(await local.saved_steps(), task_ranks(manifest))
        await reach(Point.STEPS_STARTED, job.job)
        await _all(part.run() for part in parts)
        await reach(Point.ALL_RESTORED, job.job)
        took_s = time.monotonic() - start
        job.last = {
            "restored": manifest.checkpoint,
            "restore_s": round(took_s, 4),
            "dump_s": manifest.meta["dump_s"],
            "began": manifest.meta.get("began", time_of(manifest.checkpoint)),
            "bytes_plain": manifest.bytes_plain,
            "bytes_stored": manifest.bytes_stored,
            "from_node": manifest.meta["ranks"][0]["node"],
            "from_nodes": [rank["node"] for rank in manifest.meta["ranks"]],
        }
        whose = "" if own else f"job {manifest.job} on "
        text = (
            f"restored on {','.join(job.geometry.nodes)} from checkpoint {manifest.checkpoint} of "
            f"{whose}{','.join(job.last['from_nodes'])} in {format_duration(took_s)}"
        )
        # This node last: as long as its journal says that the restore is under way, all begin it once more after a
        # death of this agent; from then on the others' parts are open too.
        if manifest.meta.get("nccl"):
            job.run_dir.quiet.touch()
        await _all(part.open(text) for part in parts[1:])
        await local.open(text)
    except BaseException:
        METRICS.restore(None)
        await asyncio.shield(_undo(parts))
        raise
    for part in parts:
        await part.close()
    if manifest.meta.get("nccl"):
        await nccl.bring_back(job)
    await _tell(job, supervisor, local.report)
    job.spawn(slurm.comment(job.job, f"gpucr: restored from {manifest.checkpoint} at {rfc3339()}"))
    job.keep_ready()
    METRICS.restore(took_s)
    log.info("restored", job=job.job, checkpoint=manifest.checkpoint, nodes=len(parts), took_s=took_s)


def task_ranks(manifest: Manifest) -> dict[str, dict[int, int]]:
    """Step key to task rank to node rank, for every task that a node has or had of a step under way."""
    found: dict[str, dict[int, int]] = {}
    for node_rank, meta in enumerate(manifest.meta["ranks"]):
        for task in meta["tasks"]:
            key, dot, rank = task["key"].partition(".")
            if dot:
                found.setdefault(key, {})[int(rank)] = node_rank
        for step in meta["steps"]:
            for rank in step["ended"]:
                found.setdefault(step["key"], {})[int(rank)] = node_rank
    return found


async def _all(work: Any) -> None:
    done = await asyncio.gather(*work, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result


async def _undo(parts: list[NodeRestore | RemoteRestore]) -> None:
    for part in reversed(parts):
        await part.undo()


async def has_sets_elsewhere(job: ProtectedJob, supervisor: Supervisor) -> bool:
    """Whether the directory that the user names holds checkpoints of the job. This node's configuration may refuse it
    where the node of an earlier run did not: then the job must not begin again. Looked at with the user's rights."""
    wanted = supervisor.hello.get("DIR")
    if not wanted:
        return False
    root = os.path.realpath(wanted)
    try:
        async with WorkerClient(root, job.uid, job.gid) as worker:
            return bool((await Catalog(job.context, worker, root).candidates(job.job, job.uid))[0])
    except (GpucrError, OSError):
        return False


async def give_up(job: ProtectedJob, supervisor: Supervisor, reason: str) -> None:
    """No checkpoint could be restored: hold the job, or start it from scratch, as configured; never silently."""
    if job.context.config.agent.on_restore_failure == "scratch" and not job.policy.restore_from:
        await lead.start(job, supervisor, None, f"not restored ({reason}); the job starts from its beginning")
        return
    message = f"not restored: {reason}. The job is held with its checkpoints kept; release it with "
    message += f"`scontrol release {job.job}` when the cause is gone"
    while True:
        try:
            await still_ours(job, supervisor)  # a hold that comes late would hit a later run
            await slurm.requeue_hold(job.job)
            break
        except RunOver:
            message = ""
            break
        except RequeueFailed as error:
            message += f" (it could not be held: {error})"
            break
        except SlurmError as error:
            log.warning("the job cannot be held yet", job=job.job, error=str(error))
        await asyncio.sleep(_PAUSE_S)
    await supervisor.refuse(message, HELD_EXIT_CODE)
