"""One protected job on this node: its state, what watches over it, and its end.

What supervisors say is dealt with in supervision.py, what a restarted agent finds in journal.py. The agent of the batch
host (node rank 0) leads: it starts the job's capsules, checkpoints and restores on all nodes (lead.py,
checkpointing.py, restarting.py). The others obey it (member.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from gpucr_hpc.agent import journal, lead, tasks
from gpucr_hpc.agent.clock import Times
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.dumpprogress import DumpProgress
from gpucr_hpc.agent.phase import AT_WORK, Phase
from gpucr_hpc.agent.policy import Policy
from gpucr_hpc.agent.steps import StepOnNode, Steps
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule import cgroup
from gpucr_hpc.capsule.capsule import Capsule, discard
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import descendants, namespace_processes, start_time, wait_gone
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CoordinationError, GpucrError
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.noderestore import NodeRestore

log = Log(__name__)

_LOOK_INTERVAL_S = 0.1


class ProtectedJob:
    """State and operations of a job on this node. Only the agent's event loop touches it."""

    def __init__(self, context: Context, job: str) -> None:
        self.context, self.job = context, job
        self.run_dir = RunDir.of(context.config.agent.run_dir, job)
        self.phase = Phase.NEW
        self.capsule: Capsule | None = None
        self.supervisors: dict[str, Supervisor] = {}
        self.connections = 0  # of supervisors, also of those that are not (yet, or any more) in `supervisors`
        self.uid = self.gid = -1
        self.groups: tuple[int, ...] = ()
        self.run = self.node_rank = 0
        self.geometry: Geometry | None = None
        self.nccl_turn = asyncio.Lock()
        self.steps = Steps(self)
        self.tasks: set[str] = set()  # keys of those that the shepherd has, ended or not
        self.expected: set[str] = set()  # keys of those whose supervisors a restore waits for
        self.store_root = context.config.store.root
        self.excluded = ""
        self.user_recipients = ""
        self.script = ""  # path of the batch script as the tree knows it
        self.paths_of = job  # the job whose id is in the tree's paths: the one as which it was started
        self.shape: dict[str, int] = {}  # tasks and processors of the whole job
        self.last: dict[str, Any] = {}
        self.gpu_word = False  # whether the user has been told how the job uses GPUs
        self.policy, self.times = Policy(), Times()
        self.dumping: DumpProgress | None = None
        self.beside = True  # memory may be read beside CRIU
        self.staying: asyncio.Task[None] | None = None  # a checkpoint led here after which the job goes on
        self.sample: tuple[float, float] | None = None  # when the job's own progress was first seen, and what it was
        self.timeouts = 0  # how often it went on after its time limit
        self.restore: NodeRestore | None = None  # under way at another node's word
        self.batch: list[int | None] = [0, 0]  # pid and start time of the batch step's supervisor
        self._arrived = asyncio.Condition()
        self._failed_step = ""
        self.turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- state that outlives the agent ------------------------------------------------------------------

    def save(self) -> None:
        """Write the journal from which a restarted agent goes on. Without it the job goes on all the same."""
        if not self.run_dir.path.exists():
            return
        try:
            self.run_dir.save(journal.state_of(self))
        except OSError as error:
            log.error("journal not written", job=self.job, error=str(error))

    def set_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.save()

    @property
    def leaving(self) -> bool:
        """The job goes from this node, or has gone: what ends now ends because of that."""
        return self.phase in (Phase.REQUEUEING, Phase.LEAVING) or self.capsule is None

    # --- workers and other nodes ------------------------------------------------------------------------

    def worker(self) -> WorkerClient:
        """A worker, not yet started, for this job's store."""
        return self.context.worker(self.store_root, self.uid, self.gid)

    async def on_all(self, verb: str, **fields: Any) -> None:
        """Tell every node of the job, this one first; raise the first error after all have answered."""
        await getattr(self, f"on_{verb}")(**fields)
        await lead.on_members(self, verb, **fields)

    async def on_step(self, key: str, stdio: str, token: str, launch: str) -> None:
        """A step is about to start: its supervisors may come."""
        known = self.steps.on_node.setdefault(key, StepOnNode(key, stdio, token))
        known.launch = launch
        self.save()

    async def on_step_end(self, key: str) -> None:
        """A step is over."""
        self.steps.on_node.pop(key, None)
        self.save()

    # --- HELLO ------------------------------------------------------------------------------------------

    async def place(self, supervisor: Supervisor, nspid: int, *, whole_tree: bool) -> None:
        """Move a task (pid inside the namespace), with whole_tree all its descendants, to its supervisor."""
        if self.capsule is None:
            return  # discarded while the request was on its way
        processes = namespace_processes(self.capsule.init_pid)
        task = next((p for p in processes if p.nspid == nspid), None)
        if task is None:
            return
        moved = [task, *descendants(processes, task.pid)] if whole_tree else [task]
        for process in moved:
            try:
                cgroup.place(process.pid, like=supervisor.pid)
                if whole_tree:  # at its start a task binds itself
                    cgroup.bind(process.pid, like=supervisor.pid)
            except (GpucrError, OSError) as error:
                log.warning("task not placed", job=self.job, pid=process.pid, error=str(error))

    async def arrived(self) -> None:
        """A supervisor has come: a restore may wait for it."""
        async with self._arrived:
            self._arrived.notify_all()

    async def all_expected(self) -> None:
        """Wait until the supervisors of every task that comes back are here."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: bool(self._failed_step) or self.expected <= set(self.supervisors))
        if self._failed_step:
            raise CoordinationError(job=self.job, reason=self._failed_step)

    def forget_failure(self) -> None:
        """Before a new restore."""
        self._failed_step = ""

    async def step_failed(self, reason: str) -> None:
        """A step that was to come back did not start, or has lost a task before the tree was there."""
        async with self._arrived:
            self._failed_step = reason
            self._arrived.notify_all()

    async def clear(self) -> None:
        """Remove what an earlier attempt to start or restore this job has left, here only."""
        restore, self.restore = self.restore, None
        if restore is not None:
            await restore.undo()
        await self.dismiss_steps()
        if self.capsule is not None:
            await self.discard()

    async def dismiss_steps(self) -> None:
        """Send away the supervisors of steps: what they were started for is given up."""
        for key in [key for key in self.supervisors if key != "batch"]:
            await self.supervisors.pop(key).refuse("", lead.CAPSULE_DIED)

    # --- frames of a running supervisor -----------------------------------------------------------------

    def batch_lives(self) -> bool:
        """Other nodes than the first have no batch supervisor: there the lead tells the end."""
        pid, start = self.batch
        return self.node_rank != 0 or (bool(pid) and start_time(pid or 0) == start)

    async def watch(self) -> None:
        """The batch supervisor has no connection: it will come again, or it ends and with it the job.

        Its connection ends a moment before the process does.
        """
        if self.node_rank != 0:
            return
        if self.batch_lives():
            await wait_gone(self.batch[0] or 0)
        if "batch" in self.supervisors or self.capsule is None:
            return
        if self.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING):
            return  # the end of the checkpoint looks for supervisors
        await self.discard()

    async def watch_capsule(self) -> None:
        """On other nodes than the first: tell the lead when the capsule dies. Its ends of the job's connections may go
        without a word, while the network is locked, and the rest of the job would wait for ever."""
        capsule, geometry = self.capsule, self.geometry
        if capsule is None or geometry is None or self.node_rank == 0:
            return
        await wait_gone(capsule.init_pid)
        if self.leaving or self.geometry is None or self.capsule is None or self.capsule.init_pid != capsule.init_pid:
            return  # it was ended in order
        log.warning("the capsule died", job=self.job)
        try:
            async with self.context.connector.to(self.job, geometry.nodes[0], geometry.addresses[0]) as peer:
                await peer.call("part_died", job=self.job, node=self.context.node, run=self.run)
        except GpucrError as error:
            log.warning("the lead was not told", job=self.job, error=str(error))

    async def part_died(self, node: str) -> None:
        """Another node's capsule has died: the job ends as a whole, its sets are kept."""
        while self.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING, Phase.RESTORING):
            await asyncio.sleep(_LOOK_INTERVAL_S)
        if self.phase not in AT_WORK or self.capsule is None:
            return
        log.warning("another node's capsule died, the job ends", job=self.job, node=node)
        if "batch" in self.supervisors:
            await self.supervisors["batch"].print(f"the capsule of this job on {node} died")
        await self.discard()

    # --- after a checkpoint, and the end ----------------------------------------------------------------

    async def stop_sealing(self) -> None:
        """The job is about to end or to leave: a checkpoint after which it was to go on is given up as soon as its
        tasks run again. Returns when it is over."""
        while self.staying is not None or self.phase is Phase.SEALING:
            if self.staying is not None and self.phase is Phase.SEALING and not self.staying.cancelling():
                self.staying.cancel()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def go_on(self, *, detached: bool, message: str, phase: Phase = Phase.RUNNING) -> None:
        """The job stays here: its supervisors take its stdio again. phase: what it goes on in."""
        if self.capsule is None or not self.capsule.alive():
            self.phase = Phase.RUNNING  # until its supervisors have seen the end
            for supervisor in list(self.supervisors.values()):
                text = message if supervisor.key == "batch" else ""
                await supervisor.attach(self.run_dir.shepherd_socket, text, restored=False)
            if not self.supervisors:
                await self.discard()
            return
        self.run_dir.leaving.unlink(missing_ok=True)
        self.set_phase(phase)
        self.keep_ready()
        for supervisor in list(self.supervisors.values()):
            text = message if supervisor.key == "batch" else ""
            if detached or supervisor.key not in self.tasks:
                await tasks.take_up(self, supervisor, text, restored=False)
            elif text:
                await supervisor.print(text)
        if detached:
            await self.steps.connect()
        if "batch" not in self.supervisors:
            self.spawn(self.watch())

    async def leave(self, message: str) -> None:
        """The job has gone from this node: its supervisors go, and everything of it is removed."""
        self.set_phase(Phase.LEAVING)
        self.context.connector.forget(self.job)
        try:
            for supervisor in list(self.supervisors.values()):
                await supervisor.release(message if supervisor.key == "batch" else "")
            await discard(self.job, self.run_dir, self.capsule)
            self.capsule, self.tasks = None, set()
        finally:
            self.phase = Phase.NEW  # its next run waits for that

    async def discard(self) -> None:
        """End the capsule and remove everything of the job from this node, and from its other nodes when this one
        leads; the store is not touched."""
        if self.phase is Phase.SEALING:
            await self.stop_sealing()
        self.context.connector.forget(self.job)
        async with self.turn:
            geometry, self.geometry, run = self.geometry, None, self.run
            await discard(self.job, self.run_dir, self.capsule)
            self.capsule, self.phase, self.tasks = None, Phase.NEW, set()
            self.steps = Steps(self)
        if geometry is not None and self.node_rank == 0:
            await lead.discard_members(self.context, self.job, geometry, run)

    def keep_ready(self) -> None:
        """When this node leads the job: have connections to the other nodes waiting for its next checkpoint."""
        if self.node_rank == 0 and self.geometry is not None and self.geometry.others:
            self.spawn(self.context.connector.keep_ready(self.job, self.geometry.others))

    @property
    def idle(self) -> bool:
        """Nothing of the job is on this node any more, and nothing is being made of it."""
        return self.capsule is None and not self.supervisors and self.restore is None and not self.turn.locked()

    @property
    def forgettable(self) -> bool:
        """Idle, and no supervisor is being served that could make something of it."""
        return self.idle and not self.connections

    def dump_progress(self) -> dict[str, Any] | None:
        """How far a checkpoint is that is under way on this node."""
        return None if self.dumping is None else self.dumping.as_dict()

    async def tell(self, message: str) -> None:
        """A line in the job's output, if its supervisor is there."""
        if "batch" in self.supervisors:
            await self.supervisors["batch"].print(message)

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
