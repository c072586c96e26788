"""A checkpoint of a protected job, from the order to the report."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import time
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import recipients
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.nccl import JobNccl
from gpucr_hpc.agent.noderestore import STEPS_STREAM
from gpucr_hpc.agent.participant import LocalParticipant
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.remote import RemoteParticipant
from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.coordinator.checkpoint import Budget, Timings
from gpucr_hpc.coordinator.checkpoint import checkpoint as coordinate
from gpucr_hpc.engine import sharedfiles
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.engine.dump import remove_link_remaps
from gpucr_hpc.errors import (
    Busy,
    CapsuleError,
    CheckpointGivenUp,
    CutNotPossible,
    DumpFailed,
    GpucrError,
    MemoryUnreadable,
    RunOver,
)
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.log import Log
from gpucr_hpc.model import ImageEntry, Manifest, new_checkpoint_id, rfc3339
from gpucr_hpc.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_REQUEUED_BUDGET_S = 20.0  # Slurm's KillWait is 30 s by default; some of it is gone when we learn of it
_SETTLE_LIMIT_S = 60.0
_SHORT_ATTEMPTS, _DUMP_ATTEMPTS = 20, 3
_RESERVE_S = 2.0
_LAST_RESERVE_S, _LONGEST_PAUSE_S = 5.0, 5.0


def budget_s(info: slurm.JobInfo | None, leave: bool, longest_s: float) -> float:
    """Seconds that a checkpoint may take before Slurm kills the job, and never more than longest_s."""
    if not leave or info is None:
        return longest_s
    if info.requeued:
        return min(_REQUEUED_BUDGET_S, longest_s)
    if info.end_time:  # a preemption cuts it to the end of the grace time
        return min(max(1.0, info.end_time - time.time()), longest_s)
    return longest_s


async def checkpoint(
    job: ProtectedJob,
    reason: str,
    *,
    leave: bool,
    hold: bool = False,
    full: bool = False,
    info: slurm.JobInfo | None,
    since: float | None = None,
) -> dict[str, Any]:
    """Take the checkpoint and, with leave, move the job away. Raises after everything is undone.

    full: write everything, whatever earlier checkpoints have.
    since: monotonic clock when the signal came that asked for it, for the report; None means now. What may be
    otherwise in a moment is tried again, see `pause_s`.
    """
    ordered = time.monotonic() if since is None else since
    limit_s = budget_s(info, leave, job.context.config.engine.dump_timeout_s)
    budget = Budget(job.job, limit_s, started=ordered)
    told: set[type[GpucrError]] = set()
    for attempt in itertools.count(1):
        began = time.monotonic()
        try:
            return await _Checkpoint(job, reason, leave, hold, info, budget, full, told).take()
        except GpucrError as error:
            last = leave and info is not None
            pause = pause_s(error, attempt, time.monotonic() - began, budget.left(), last=last)
            if pause is None:
                raise
            failure = error
            told.add(type(error))
            log.info("it is tried again", job=job.job, attempt=attempt, pause_s=pause, reason=str(error))
        await asyncio.sleep(pause)
        if leave:
            await job.stop_sealing()  # a periodic one may have begun meanwhile
        if job.capsule is None or not job.capsule.alive():
            raise failure
    raise AssertionError("unreachable")


def pause_s(error: GpucrError, attempt: int, took_s: float, left_s: float, *, last: bool) -> float | None:
    """Seconds until the next try after one that took so long and failed, None when there shall be none.

    A cut that cannot be taken at this moment (a step just starts, a PMI request is open) and memory that could not be
    read beside CRIU (by CRIU alone then) are tried again a few times; so is a dump, seldom: a connection was just
    being made. last: Slurm takes the job away in any case, and what is not saved is lost. So whatever stands against
    it now is tried again as long as there is time: the job may let go of it, an agent that died is started anew.
    """
    if isinstance(error, Busy | RunOver):
        return None
    pause: float | None = None
    enough = left_s > _RESERVE_S + 2 * took_s
    if isinstance(error, CutNotPossible | MemoryUnreadable) and attempt < _SHORT_ATTEMPTS and enough:
        pause = random.uniform(0.05, 0.3)  # noqa: S311 - spreads tries, hides nothing
    elif isinstance(error, DumpFailed) and attempt < _DUMP_ATTEMPTS and enough:
        pause = random.uniform(0.2, 0.5)  # noqa: S311
    elif last:
        # Longer and longer, and at least as long as the job stood still: it has to run to let go.
        pause = min(max(_LONGEST_PAUSE_S, took_s), max(1.0, took_s) * 1.5 ** min(attempt - 1, 10))
        if left_s < _LAST_RESERVE_S + pause + 1.5 * took_s:
            pause = None
    return pause


class _Checkpoint:
    """One attempt. told: kinds of failures that the user has read of."""

    def __init__(
        self,
        job: ProtectedJob,
        reason: str,
        leave: bool,
        hold: bool,
        info: slurm.JobInfo | None,
        budget: Budget,
        full: bool,
        told: set[type[GpucrError]],
    ) -> None:
        self._told = told
        self._job, self._reason, self._leave, self._hold, self._full = job, reason, leave, hold, full
        self._info, self._budget = info, budget
        self._id = new_checkpoint_id()
        self._key = DataKey.generate(job.context.site_keys[0].id_key(job.job))
        self._began = time.time()
        self._counts = int(leave and reason == "timeout")
        self._timings = Timings()
        self._worker = job.worker()
        self._catalog = Catalog(job.context, self._worker, job.store_root)
        self._local = LocalParticipant(
            job,
            self._worker,
            checkpoint=self._id,
            data_key=self._key.reveal_hex(),
            leave_running=not leave,
            full=full,
            extra=self._extra,
        )
        self._remote: list[RemoteParticipant] = []
        self._nccl = JobNccl(
            job,
            wanted=lambda: any(part.has_nccl for part in self._parts),
            needed=lambda: any(part.needs_nccl_away for part in self._parts),
        )

    @property
    def _parts(self) -> list[LocalParticipant | RemoteParticipant]:
        return [self._local, *self._remote]

    def _extra(self) -> dict[str, bytes]:
        steps = self._job.steps.state()["steps"]
        return {STEPS_STREAM: json.dumps(steps).encode()}

    def _agree(self) -> None:
        """Whether every task of every step is where it can be saved: started, and with no PMI request open."""
        busy = [t.key for part in self._parts for t in part.tasks if t.pmi == "busy"]
        if busy:
            raise CutNotPossible(job=self._job.job, reason=f"task {busy[0]} waits for an answer of PMI")
        for key in self._job.steps.steps:
            there = {t.key for part in self._parts for t in part.tasks if t.key.startswith(f"{key}.")}
            tasks = max((s["tasks"] for part in self._parts for s in part.steps if s["key"] == key), default=0)
            ended = sum(len(s["ended"]) for part in self._parts for s in part.steps if s["key"] == key)
            if there and len(there) + ended < tasks:
                raise CutNotPossible(job=self._job.job, reason=f"step {key} is just starting")

    async def _publish(self) -> None:
        job, context = self._job, self._job.context
        assert job.geometry is not None
        spans = {
            "signal_to_frozen_s": round(max(p.frozen_at for p in self._parts) - self._budget.started, 4),
            "dump_s": round(max(p.dump_s for p in self._parts), 4),
        }
        sharedfiles.agree([part.meta["files"] for part in self._parts])
        manifest = Manifest(
            checkpoint=self._id,
            job=job.job,
            uid=job.uid,
            gid=job.gid,
            reason=self._reason,
            run=job.run,
            images=[ImageEntry.from_dict(part.entry) for part in self._parts],
            slots=[
                self._key.wrap(context.site_keys[0], self._id),
                *(r.wrap(self._key, self._id) for r in recipients.of_job(job)),
            ],
            meta={
                "names": list(job.geometry.names),
                "ranks": [part.meta for part in self._parts],
                "phases_s": self._timings.phases,
                "began": self._began,
                "timeouts": job.timeouts,
                "paths_of": job.paths_of,
                "shape": job.shape,
                "nccl": self._nccl.taken,
                **spans,
            },
        )
        data = manifest_file.encode(manifest, context.signing_key)
        await self._worker.call("publish", manifest=base64.b64encode(data).decode())
        await self._catalog.note_latest(job.job, self._id)
        job.last = {
            "checkpoint": self._id,
            "job": job.job,
            "node": context.node,
            "nodes": list(job.geometry.nodes),
            "reason": self._reason,
            "began": self._began,
            "bytes_plain": manifest.bytes_plain,
            "bytes_stored": manifest.bytes_stored,
            **spans,
        }

    async def _requeue(self) -> None:
        if self._info is None or not self._info.requeued:
            await (slurm.requeue_hold if self._hold else slurm.requeue)(self._job.job)
        await self._catalog.note_latest(self._job.job, self._id, left=True)

    async def _coordinate(self) -> None:
        """All phases, as a task of its own that the job can end when it is about to end itself."""
        job = self._job
        work = asyncio.ensure_future(
            coordinate(
                self._parts,
                self._budget,
                agree=self._agree,
                publish=self._publish,
                leave=self._requeue if self._leave else None,
                timings=self._timings,
                quiesce=self._nccl,
            )
        )
        if self._leave:
            await work
            return
        job.staying = work
        try:
            await work
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if not work.cancelling() or (own is not None and own.cancelling()):
                raise
            raise CheckpointGivenUp(job=job.job) from None

    async def take(self) -> dict[str, Any]:
        job = self._job
        if job.phase is not Phase.RUNNING:  # an earlier attempt let go of it for a moment
            raise Busy(job=job.job, operation=f"{job.phase}")
        job.timeouts += self._counts
        job.set_phase(Phase.CHECKPOINTING)
        log.info("checkpoint begins", job=job.job, checkpoint=self._id, reason=self._reason, left_s=self._budget.left())
        try:
            await self._connect()
            await self._coordinate()
            await self._prune()
        except BaseException as error:
            job.timeouts -= self._counts
            quiet = isinstance(error, CutNotPossible | CheckpointGivenUp) or type(error) in self._told
            message = "" if quiet else f"checkpoint not possible, the job runs on: {error}"
            await job.go_on(detached=self._local.detached, message=message)
            raise
        finally:
            for part in self._remote:
                part.close()
            job.staying = None
            job.last |= {"phases_s": self._timings.phases}
            await self._worker.close()
        job.last |= {"total_s": round(time.time() - self._began, 4)}
        if not self._leave:
            job.last |= {"freeze_s": round(max(part.freeze_s for part in self._parts), 4)}
        report = dict(job.last)
        job.spawn(slurm.comment(job.job, f"gpucr: checkpoint {self._id} ({self._reason}) at {rfc3339(self._began)}"))
        log.info(
            "checkpoint committed",
            **{k: v for k, v in report.items() if k != "phases_s"},
            **self._timings.phases,
        )
        text = (
            f"checkpoint {self._id} written in {format_duration(report['total_s'])}: "
            f"{format_bytes(report['bytes_plain'])}, {format_bytes(report['bytes_stored'])} stored"
        )
        if self._leave:
            held = " and is held: scontrol release" if self._hold else ""
            # A drained node takes no job, and any node is good for one that only needs more time.
            elsewhere = self._reason not in ("drain", "timeout")
            await _leave(job, f"{text}; the job leaves {','.join(report['nodes'])}{held}", self._info, elsewhere)
        else:
            text += f"; the job stood still for {format_duration(report['freeze_s'])}"
            await job.go_on(detached=False, message=text)
        return report

    async def _connect(self) -> None:
        job, geometry = self._job, self._job.geometry
        assert geometry is not None
        await self._nccl.settled(self._budget.left() / 2)
        for peer in await job.context.connector.open_all(job.job, geometry.others):
            self._remote.append(
                RemoteParticipant(
                    job.job,
                    peer,
                    self._local.staged,
                    run=job.run,
                    checkpoint=self._id,
                    data_key=self._key.reveal_hex(),
                    leave_running=not self._leave,
                    full=self._full,
                )
            )

    async def _prune(self) -> None:
        """A new set was committed: remove those beyond the number to keep."""
        try:
            keep_last = self._job.context.config.store.keep_last
            await self._catalog.prune(self._job.job, keep_last, fresh=self._id)
        except GpucrError as error:
            log.warning("old checkpoints not removed", job=self._job.job, error=str(error))


async def _leave(job: ProtectedJob, message: str, info: slurm.JobInfo | None, elsewhere: bool) -> None:
    """After commit and requeue: nothing of the job stays here, and Slurm gets the node back early."""
    assert job.geometry is not None
    nodes = list(job.geometry.nodes)
    job.set_phase(Phase.LEAVING)  # from here on the end of its batch supervisor removes the job
    try:
        info = info or await slurm.job(job.job)
        await slurm.keep_away(info, nodes, job.excluded, elsewhere=elsewhere)
    except GpucrError as error:
        log.warning("no wish for another node", job=job.job, error=str(error))
    job.spawn(slurm.forgive(job.job, job.excluded, job.run + 1))
    await job.leave(message)


async def settle(capsule: Capsule, run_dir: RunDir, config: CudaConfig) -> None:
    """Wait until a CRIU that an earlier agent had started in a capsule is gone, and clean up behind it."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    run_dir.leaving.unlink(missing_ok=True)
    while any(p.name in ("criu", "gpucr-hook") for p in namespace_processes(capsule.init_pid)):
        if time.monotonic() > deadline:
            raise CapsuleError(job=capsule.job, node="this node", reason="an earlier CRIU does not end")
        await asyncio.sleep(0.05)
    remove_link_remaps(capsule)
    await network.unlock(capsule.job)
    gpus = NodeGpus(capsule.job, config)
    try:
        await gpus.find(namespace_processes(capsule.init_pid), orphaned=True)
        await gpus.resume(run_dir.load_gpus())
    finally:
        await gpus.close()


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
