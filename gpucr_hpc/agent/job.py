"""One protected job on this node: its life from the first HELLO to the end of its capsule."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Coroutine
from typing import Any

from gpucr_hpc import slurm, wire
from gpucr_hpc.agent import checkpointing, restarting
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.phase import Decision, Phase, decide
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule import Capsule, RunDir, build, network
from gpucr_hpc.capsule.capsule import Identity, discard
from gpucr_hpc.capsule.processes import start_time, wait_gone
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import Busy, GpucrError, PermissionRefused, Refused, SlurmError
from gpucr_hpc.log import Log
from gpucr_hpc.model import new_checkpoint_id

log = Log(__name__)

_CAPSULE_DIED = 137  # as gpucr-task says it


class ProtectedJob:
    """State and operations of a job. Only the agent's event loop touches it."""

    def __init__(self, context: Context, job: str) -> None:
        self.context, self.job = context, job
        self.run_dir = RunDir.of(context.config.agent.run_dir, job)
        self.phase = Phase.NEW
        self.capsule: Capsule | None = None
        self.supervisors: dict[str, Supervisor] = {}
        self.uid = self.gid = -1
        self.run = 0
        self.excluded = ""  # nodes that the user excluded, without the one that we keep it away from
        self.tasks: set[str] = set()  # keys of those that the shepherd has, ended or not
        self.store_root = context.config.store.root
        self.last: dict[str, Any] = {}
        self.progress: dict[str, Any] = {}
        self._batch: list[int | None] = [0, 0]  # pid and start time of the batch step's supervisor
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- state that outlives the agent ------------------------------------------------------------------

    def save(self) -> None:
        """Write the journal from which a restarted agent goes on."""
        self.run_dir.save(
            {
                "job": self.job,
                "phase": self.phase,
                "uid": self.uid,
                "gid": self.gid,
                "run": self.run,
                "excluded": self.excluded,
                "tasks": sorted(self.tasks),
                "store_root": self.store_root,
                "capsule": None if self.capsule is None else dataclasses.asdict(self.capsule),
                "supervisor": self._batch,
                "last": self.last,
            }
        )

    def set_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.save()

    async def adopt(self, state: dict[str, Any]) -> bool:
        """Take over a capsule that an earlier agent made; False when nothing of it is left to keep.

        A dump that was under way has been undone by CRIU itself, since it lost its hook and its stream; here
        we wait for its end and open the network again. A restore that was under way has ended one way or the other.
        """
        self.uid, self.gid, self.run = state["uid"], state["gid"], state["run"]
        self.store_root, self.last = state["store_root"], state["last"]
        self.tasks, self.excluded = set(state["tasks"]), state["excluded"]
        self.capsule = Capsule(**state["capsule"]) if state["capsule"] else None
        phase = Phase(state["phase"])
        self._batch = state["supervisor"]
        if self.capsule is not None and not self.capsule.alive():
            self.capsule = None
        if self.capsule and phase is Phase.REQUEUEING:
            try:
                info = await slurm.job(self.job)
                phase = Phase.LEAVING if not info.running or info.restarts > self.run else Phase.RUNNING
            except SlurmError as error:
                log.warning("slurmctld does not answer, job kept", job=self.job, error=str(error))
                phase = Phase.RUNNING
        if self.capsule and phase is Phase.RESTORING and await checkpointing.restored(self.capsule):
            phase = Phase.RUNNING
        gone = self.capsule is None or not self.capsule.alive() or not self._batch_lives()
        if gone or phase in (Phase.RESTORING, Phase.NEW, Phase.LEAVING):
            log.info("remains of a job removed", job=self.job, phase=phase)
            await discard(self.job, self.run_dir, self.capsule)
            self.capsule = None
            return False
        assert self.capsule is not None
        await checkpointing.settle(self.capsule, self.run_dir)
        await network.unlock(self.job)
        self.set_phase(Phase.RUNNING)
        self.spawn(self.watch())
        log.info("job found again", job=self.job, init_pid=self.capsule.init_pid)
        return True

    # --- workers ----------------------------------------------------------------------------------------

    def worker(self) -> WorkerClient:
        """A worker, not yet started, for this job's store."""
        return self.context.worker(self.store_root, self.uid, self.gid)

    # --- HELLO ------------------------------------------------------------------------------------------

    async def hello(self, supervisor: Supervisor) -> None:
        """A supervisor is there: start its task, attach it, or tell it to go."""
        async with self._turn:
            self.supervisors[supervisor.key] = supervisor
            if supervisor.key == "batch":
                self._batch = [supervisor.pid, start_time(supervisor.pid)]
            if self.phase is Phase.LEAVING:
                await supervisor.release("")
            elif self.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING):
                pass  # the end of the checkpoint tells it what to do
            elif self.capsule is not None and self.capsule.alive():
                self.save()
                if supervisor.hello.int("ATTACHED"):
                    await supervisor.ok()
                else:
                    await self._admit(supervisor)
                if supervisor.hello.int("NOTICE"):
                    self.spawn(self.notice(supervisor, supervisor.hello.int("NOTICE")))
                elif supervisor.hello.get("MODE") == "again":
                    self.spawn(self._missed())
            elif supervisor.hello.get("MODE") == "again":
                await self._without_capsule(supervisor)
            else:
                await self._begin(supervisor)

    async def _admit(self, supervisor: Supervisor) -> None:
        """The capsule is there and this supervisor is not attached: its task runs already, or not yet."""
        if supervisor.key in self.tasks:
            await supervisor.attach(self.run_dir.shepherd_socket, "")
        else:
            await self._start_task(supervisor, "")

    async def _start_task(self, supervisor: Supervisor, message: str) -> None:
        await supervisor.start(self.run_dir.shepherd_socket, self._env(), message)
        self.tasks.add(supervisor.key)  # not before: a supervisor that has heard START ignores a second one
        self.save()

    async def _without_capsule(self, supervisor: Supervisor) -> None:
        """A supervisor of an earlier agent, whose capsule is gone: its run must not begin again here."""
        self.uid, self.gid, self.run = supervisor.uid, supervisor.gid, supervisor.hello.int("RESTART")
        try:
            info = await slurm.job(self.job)
            self._check(info, supervisor)
            self.store_root = self.context.store_root(supervisor.hello.get("DIR"))
            left = info.requeued or info.restarts > self.run
        except GpucrError as error:
            log.warning("whether the job has left is not known", job=self.job, error=str(error))
            left = False
        if left:
            await supervisor.release("")
        elif supervisor.hello.int("ATTACHED"):
            await supervisor.ok()  # it says ENDED, or learns from its shepherd that nothing is left
        else:
            await supervisor.refuse("the capsule of this job died", _CAPSULE_DIED)

    def _env(self) -> dict[str, str]:
        """Variables that every task of the capsule gets."""
        return {"GPUCR_CAPSULE": self.job}

    async def _begin(self, supervisor: Supervisor) -> None:
        """First supervisor of this run on this node."""
        self.uid, self.gid = supervisor.uid, supervisor.gid
        restarted = supervisor.hello.int("RESTART") > 0
        try:
            info = await slurm.job(self.job)
            self._check(info, supervisor)
            self.run = max(info.restarts, supervisor.hello.int("RESTART"))
            restarted = restarted or self.run > 0
            self.excluded = info.excluded_nodes
            self.store_root = self.context.store_root(supervisor.hello.get("DIR"))
            await self._take(supervisor)
        except (GpucrError, OSError) as error:
            log.error("job not taken", job=self.job, error=str(error))
            if restarted and not isinstance(error, PermissionRefused | Refused):
                await restarting.give_up(self, supervisor, str(error))
            elif self.context.config.agent.when_unprotected == "fail":
                await supervisor.refuse(f"this job cannot be protected: {error}", 1)
            else:
                await supervisor.run_unprotected(f"this job runs without protection: {error}")

    async def _take(self, supervisor: Supervisor) -> None:
        try:
            if self.run == 0:
                await self._start(supervisor, "")
            else:
                await restarting.restart(self, supervisor)
        except (GpucrError, OSError):
            await discard(self.job, self.run_dir, self.capsule)
            self.capsule, self.phase, self.tasks = None, Phase.NEW, set()
            raise

    def _check(self, info: slurm.JobInfo, supervisor: Supervisor) -> None:
        if info.uid != supervisor.uid:
            raise PermissionRefused(who=f"uid {supervisor.uid}", action=f"speak for job {self.job}")
        if info.node_count > 1:
            raise Refused(reason=f"it runs on {info.node_count} nodes; this release protects jobs of one node")
        if info.is_het:
            raise Refused(reason="it is part of a heterogeneous job")
        if self.context.criu is None:
            raise self.context.criu_problem or Refused(reason="CRIU is not usable on this node")

    async def start_fresh(self, supervisor: Supervisor, message: str) -> None:
        """Start the job from its beginning although an earlier run of it is known."""
        await self._start(supervisor, message)

    async def _start(self, supervisor: Supervisor, message: str) -> None:
        self.run_dir.make(self.uid, self.gid)
        builder, _ = await asyncio.gather(
            build(
                self.job,
                self.run_dir,
                Identity.of(supervisor.pid, self.uid, self.gid),
                hostname=self.context.node,
                node_rank=0,
                config=self.context.config.network,
            ),
            self._note_first_run(),
        )
        self.capsule = builder.capsule
        self.set_phase(Phase.RUNNING)
        log.info("capsule built", job=self.job, init_pid=self.capsule.init_pid)
        await self._start_task(supervisor, message)

    async def _note_first_run(self) -> None:
        """Also the first touch of the store: a job whose store cannot be written learns it at its start."""
        async with self.worker() as worker:
            await Catalog(self.context, worker, self.store_root).first_run(
                self.job, new_checkpoint_id(), self.excluded
            )

    # --- frames of a running supervisor -----------------------------------------------------------------

    async def frame(self, supervisor: Supervisor, frame: wire.Frame) -> None:
        """Anything a supervisor says after HELLO."""
        if frame.type is wire.Type.NOTICE:
            self.spawn(self.notice(supervisor, frame.int("SIGNAL")))
        elif frame.type is wire.Type.ENDED:
            self.spawn(self._ended(supervisor, frame.int("STATUS"), bool(frame.int("NOTICE"))))

    async def notice(self, supervisor: Supervisor, signal: int) -> None:
        """Slurm sent a signal to the supervisor; find out what it means and act."""
        arrived, notice_signal = time.monotonic(), supervisor.hello.int("SIGNAL")
        if self.phase in (Phase.LEAVING, Phase.REQUEUEING):
            await supervisor.absorb(signal)
            return
        try:
            info = await slurm.job(self.job)
            decision = decide(info, signal, notice_signal)
        except SlurmError as error:
            # Without an answer our own signal is taken for what it mostly is; others are the user's.
            log.warning("slurmctld does not answer", job=self.job, error=str(error))
            info, decision = None, Decision.REQUEUE if signal == notice_signal else Decision.FORWARD
        log.info("signal", job=self.job, signal=signal, decision=decision)
        if decision is Decision.FORWARD:
            await supervisor.forward(signal)
            return
        await supervisor.absorb(signal)
        if decision is not Decision.IGNORE:
            await self._leave(info, arrived)

    async def _missed(self) -> None:
        """Take up again what an earlier agent had been told to do: Slurm tells it only once."""
        arrived, info = time.monotonic(), await slurm.job(self.job)
        if info.being_preempted or info.requeued:
            await self._leave(info, arrived)

    async def _leave(self, info: slurm.JobInfo | None, since: float) -> None:
        try:
            await self.checkpoint("preempt", leave=True, info=info, since=since)
        except Busy:
            pass
        except GpucrError as error:
            log.error("checkpoint failed", job=self.job, error=str(error))

    async def checkpoint(
        self, reason: str, *, leave: bool, info: slurm.JobInfo | None = None, since: float | None = None
    ) -> dict[str, Any]:
        """Take a checkpoint; with leave the job is requeued after it. Returns the report of it.

        Raises Busy when one is under way, otherwise what went wrong, the job running on.
        """
        if self.phase is not Phase.RUNNING or self.capsule is None:
            raise Busy(job=self.job, operation=f"{self.phase}")
        return await checkpointing.checkpoint(self, reason, leave=leave, info=info, since=since)

    async def _ended(self, supervisor: Supervisor, status: int, notice: bool) -> None:
        """The batch task ended by itself. A record keeps Slurm's requeue at a grace time's end from running it
        again; a job that ended well needs its checkpoints no more."""
        try:
            if not notice:
                notice = (await slurm.job(self.job)).being_preempted
            async with self.worker() as worker:
                catalog = Catalog(self.context, worker, self.store_root)
                if notice:
                    await catalog.ended(self.job, self.run, status)
                await supervisor.ok()
                if status == 0:
                    await catalog.retire(self.job)
        except GpucrError as error:
            log.error("end not recorded", job=self.job, error=str(error))
            await supervisor.ok()

    async def gone(self, supervisor: Supervisor) -> None:
        """A supervisor's connection ended. When its process is dead too, the capsule has no reason to live."""
        if self.supervisors.get(supervisor.key) is supervisor:
            del self.supervisors[supervisor.key]
        self.spawn(self.watch())

    def _batch_lives(self) -> bool:
        pid, start = self._batch
        return bool(pid) and start_time(pid or 0) == start

    async def watch(self) -> None:
        """The supervisor has no connection: it will come again, or it ends and with it the job on this node.

        Its connection ends a moment before the process does.
        """
        if self._batch_lives():
            await wait_gone(self._batch[0] or 0)
        if self.supervisors or self.capsule is None:
            return
        if self.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING):
            return  # the end of the checkpoint looks for supervisors
        await self.discard()

    async def discard(self) -> None:
        """End the capsule and remove everything of the job from this node; the store is not touched."""
        async with self._turn:
            await discard(self.job, self.run_dir, self.capsule)
            self.capsule, self.phase, self.tasks = None, Phase.NEW, set()

    @property
    def idle(self) -> bool:
        """Nothing of the job is on this node any more."""
        return self.capsule is None and not self.supervisors

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the connection's loop; its failure is logged, never lost."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            log.error("unexpected", job=self.job, error=repr(error))

    def may(self, uid: int, operators: set[int]) -> bool:
        """Whether a local user may act on this job."""
        return uid in (0, self.uid, os.geteuid()) or uid in operators
