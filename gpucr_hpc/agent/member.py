"""What an agent does at the word of the one that leads a job: one session for each operation."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from typing import Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import nccl
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.noderestore import NodeRestore
from gpucr_hpc.agent.participant import LocalParticipant
from gpucr_hpc.agent.peers import Session
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.policy import Policy
from gpucr_hpc.capsule.capsule import Identity, build
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.engine.nccl.node import NodeRanks
from gpucr_hpc.engine.openfiles import FilesPolicy
from gpucr_hpc.errors import Busy, CapsuleError, GpucrError, JobNotProtected, RunOver
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.log import Log

log = Log(__name__)

_LOOK_INTERVAL_S = 0.05


class MemberSession(Session):
    """Requests of a lead. A checkpoint or restore that is not finished when the connection ends is undone here."""

    interruptible = frozenset(
        {"prepare", "join", "gpu_lock", "lock", "capture", "seal", "restore_build", "restore_run"}
    )

    def __init__(self, context: Context, jobs: dict[str, ProtectedJob]) -> None:
        self._context, self._jobs = context, jobs
        self._participant: LocalParticipant | None = None
        self._restore: NodeRestore | None = None
        self._job: ProtectedJob | None = None
        self._ranks = NodeRanks([])

    def _get(self, job: str, run: int) -> ProtectedJob:
        """The job as it runs here; a lead of another run, which may not know it yet, has no say in it."""
        found = self._jobs.get(job)
        if found is None or found.capsule is None:
            raise JobNotProtected(job=job, node=self._context.node)
        if found.run != run:
            raise RunOver(job=job, run=run)
        return found

    def _set_up(self, job: str, node_rank: int, fields: dict[str, Any]) -> ProtectedJob:
        found = self._jobs.setdefault(job, ProtectedJob(self._context, job))
        for key in [key for key, supervisor in found.supervisors.items() if supervisor.uid != fields["uid"]]:
            del found.supervisors[key]
        found.uid, found.gid, found.run = fields["uid"], fields["gid"], fields["run"]
        found.groups, found.store_root = tuple(fields["groups"]), fields["store_root"]
        found.excluded = fields["excluded"]
        found.node_rank = node_rank
        found.policy = Policy(files=FilesPolicy(fields["files"]), hide_io_uring=fields["hide_io_uring"])
        found.geometry = Geometry(*(tuple(fields[k]) for k in ("names", "nodes", "addresses")))
        return found

    # --- start and end ----------------------------------------------------------------------------------

    async def do_build(self, job: str, **fields: Any) -> None:
        """Make this node's capsule for a job that starts."""
        if self._context.criu is None:
            raise self._context.criu_problem or CapsuleError(job=job, node=self._context.node, reason="no CRIU")
        await self._clear(job, fields["run"])  # of a lead that died while it began this run
        rank = fields["nodes"].index(self._context.node)
        found = self._set_up(job, rank, fields)
        async with found.turn:
            found.run_dir.make(found.uid, found.gid)
            assert found.geometry is not None
            builder = await build(
                job,
                found.run_dir,
                Identity(found.uid, found.gid, found.groups),
                geometry=found.geometry,
                node_rank=rank,
                config=self._context.config.network,
                hide_io_uring=found.policy.hide_io_uring,
            )
            found.capsule = builder.capsule
            found.set_phase(Phase.RUNNING)
            await found.steps.connect()
            found.spawn(found.watch_capsule())

    async def do_step(self, job: str, run: int, key: str, stdio: str, token: str, launch: str) -> None:
        await self._get(job, run).on_step(key, stdio, token, launch)

    async def do_step_end(self, job: str, run: int, key: str) -> None:
        await self._get(job, run).on_step_end(key)

    async def do_part_died(self, job: str, node: str, run: int) -> None:
        """Said to the lead by another node."""
        found = self._jobs.get(job)
        if found is not None and found.node_rank == 0 and found.run == run:
            found.spawn(found.part_died(node))

    async def do_discard(self, job: str, run: int) -> None:
        """This run of the job is over."""
        found = self._jobs.get(job)
        if found is not None and found.run <= run:
            await found.discard()
            if found.forgettable:
                self._jobs.pop(job, None)

    # --- checkpoint -------------------------------------------------------------------------------------

    async def do_prepare(
        self, job: str, run: int, checkpoint: str, data_key: str, leave_running: bool, full: bool = False
    ) -> dict[str, Any]:
        found = self._get(job, run)
        while found.phase in (Phase.CHECKPOINTING, Phase.SEALING):  # one whose lead was lost is still being undone
            await asyncio.sleep(_LOOK_INTERVAL_S)
            found = self._get(job, run)
        if found.phase is not Phase.RUNNING:
            raise Busy(job=job, operation=f"{found.phase}")
        self._job, self._leave = found, not leave_running
        self._worker = found.worker()
        self._participant = LocalParticipant(
            found, self._worker, checkpoint=checkpoint, data_key=data_key, leave_running=leave_running, full=full
        )
        found.set_phase(Phase.CHECKPOINTING)  # from here on `close` undoes it
        await self._participant.make_ready()
        part = self._participant
        return {"gpus": part.has_gpus, "nccl": part.has_nccl, "nccl_away": part.needs_nccl_away}

    def _part(self, job: str) -> LocalParticipant:
        if self._participant is None:
            raise JobNotProtected(job=job, node=self._context.node)
        return self._participant

    async def do_join(self, job: str) -> None:
        await self._part(job).join()

    async def do_gpu_lock(self, job: str) -> None:
        await self._part(job).gpu_lock()

    async def do_gpu_unlock(self, job: str) -> None:
        await self._part(job).gpu_unlock()

    async def do_lock(self, job: str) -> dict[str, Any]:
        part = self._part(job)
        await part.lock()
        return {"tasks": [dataclasses.asdict(t) for t in part.tasks], "steps": part.steps}

    async def do_capture(self, job: str) -> dict[str, Any]:
        part, start = self._part(job), time.monotonic()
        await part.capture()
        return {
            "entry": part.entry,
            "meta": part.meta,
            "dump_s": part.dump_s,
            "frozen_after_s": part.frozen_at - start,
        }

    async def do_resume(self, job: str) -> dict[str, Any]:
        part = self._part(job)
        await part.resume()
        return {"freeze_s": part.freeze_s}

    async def do_seal(self, job: str) -> dict[str, Any]:
        part = self._part(job)
        await part.seal()
        return {"entry": part.entry, "dump_s": part.dump_s}

    async def do_commit(self, job: str) -> None:
        await self._part(job).commit()

    async def do_finish(self, job: str) -> None:
        part, self._participant = self._part(job), None
        await self._finish(part)

    async def _finish(self, part: LocalParticipant) -> None:
        assert self._job is not None
        try:
            await part.finish()
        finally:
            await self._worker.close()
        if self._leave:
            if self._job.node_rank == 1:  # the lead does it, too, but its node may be lost
                self._job.spawn(slurm.forgive(self._job.job, self._job.excluded, self._job.run + 1))
            await self._job.leave("")
            if self._job.forgettable and self._jobs.get(self._job.job) is self._job:
                del self._jobs[self._job.job]
        else:
            await self._job.go_on(detached=False, message="")

    async def do_undo(self, job: str) -> None:
        part, self._participant = self._part(job), None
        await self._undo(part)

    async def _undo(self, part: LocalParticipant) -> None:
        assert self._job is not None
        await part.undo()
        await self._job.go_on(detached=part.detached, message="")

    # --- NCCL -------------------------------------------------------------------------------------------

    async def do_nccl_begin(self, job: str, run: int) -> None:
        found = self._get(job, run)
        if found.capsule is None or found.phase in (Phase.RESTORING, Phase.NEW):
            raise JobNotProtected(job=job, node=self._context.node)
        self._ranks = await nccl.ranks_here(found)

    async def do_nccl(self, job: str, word: str, pairs: list[list[str]], at: int | None) -> list[Any]:  # noqa: ARG002
        answers = await self._ranks.order(word, [(key, value) for key, value in pairs], at)
        return [answer.pairs for answer in answers]

    async def do_nccl_verify(self, job: str) -> None:  # noqa: ARG002 - every request names its job
        await self._ranks.verify()

    async def do_nccl_end(self, job: str) -> None:  # noqa: ARG002
        ranks, self._ranks = self._ranks, NodeRanks([])
        await ranks.close()

    # --- restore ----------------------------------------------------------------------------------------

    async def do_restore_build(
        self, job: str, node_rank: int, manifest: str, of: str, ran_on: bool, **fields: Any
    ) -> None:
        if self._context.criu is None:
            raise self._context.criu_problem or CapsuleError(job=job, node=self._context.node, reason="no CRIU")
        await self._clear(job, fields["run"])
        self._job = self._set_up(job, node_rank, fields)
        decoded = manifest_file.decode(base64.b64decode(manifest), "manifest", self._context.trusted, job=of)
        self._restore = self._job.restore = NodeRestore(self._job, decoded, ran_on=ran_on)
        await self._restore.build()

    async def _clear(self, job: str, run: int) -> None:
        """Nothing of an earlier attempt may be there, nor a supervisor that waits for its word; the end of that
        attempt's connection may be noticed late. Raises RunOver for a lead that is late itself."""
        old = self._jobs.get(job)
        if old is None:
            return
        if old.run > run and not old.idle:
            raise RunOver(job=job, run=run)
        await old.clear()

    async def do_restore_run(self, job: str) -> None:
        assert self._restore is not None, job
        await self._restore.run()

    async def do_restore_open(self, job: str) -> None:
        assert self._restore is not None, job
        assert self._job is not None
        await self._restore.open("")
        self._restore = self._job.restore = None
        self._job.spawn(self._job.watch_capsule())

    # --- the end of the connection ----------------------------------------------------------------------

    async def close(self) -> None:
        self._ranks.drop()
        try:
            await self._close_checkpoint()
        finally:
            await self._close_restore()

    async def _close_checkpoint(self) -> None:
        if self._participant is not None and self._job is not None:
            part, self._participant = self._participant, None
            if self._job.phase is Phase.REQUEUEING and await self._has_left(self._job):
                log.info("lead lost after the commit, the job leaves", job=self._job.job)
                await self._finish(part)
            else:
                log.warning("lead lost, checkpoint undone", job=self._job.job)
                await self._undo(part)

    async def _close_restore(self) -> None:
        if self._restore is not None:
            restore, self._restore = self._restore, None
            await restore.undo()
            if self._job is not None and self._job.restore is restore:
                self._job.restore = None

    async def _has_left(self, job: ProtectedJob) -> bool:
        """After a commit only Slurm knows whether the requeue that was to follow has happened."""
        for _ in range(20):
            try:
                info = await slurm.job(job.job)
                return not info.running or info.restarts > job.run
            except GpucrError:
                await asyncio.sleep(1)
        return False
