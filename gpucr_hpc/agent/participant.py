"""This node's part in a checkpoint."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from gpucr_hpc.agent import batchscript, shepherd
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.dumpprogress import DumpProgress
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.capsule import PRIVATE_DIRECTORIES
from gpucr_hpc.capsule.processes import Process, namespace_processes
from gpucr_hpc.engine import early, large, preflight, sockets, stream, summary
from gpucr_hpc.engine.cuda import preflight as gpu_preflight
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.engine.dump import Dump, Frozen, add_bytes, remove_link_remaps
from gpucr_hpc.engine.nccl import node as nccl
from gpucr_hpc.engine.openfiles import OpenFile, output_files, writable_files
from gpucr_hpc.engine.restore import describe_host, tree_meta
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CoordinationError, CutNotPossible, GpucrError, MemoryUnreadable, Refused, StoreFull
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.log import Log
from gpucr_hpc.units import format_bytes

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

# Below this much free space no checkpoint is begun: manifests and records must always fit.
_RESERVE_BYTES = 64 << 20

log = Log(__name__)


def timed(
    phase: Callable[[LocalParticipant], Coroutine[Any, Any, None]],
) -> Callable[[LocalParticipant], Coroutine[Any, Any, None]]:
    """Note how long this node was at work in a phase, without its waiting for others."""

    @functools.wraps(phase)
    async def run(part: LocalParticipant) -> None:
        start = time.monotonic()
        await phase(part)
        part.own_s[phase.__name__] = round(time.monotonic() - start, 4)
        if phase.__name__ == ("seal" if part.leave_running else "capture"):
            log.info("image written", **part.names, **part.own_s)

    return run


class LocalParticipant:
    """Implements coordinator.checkpoint.Participant for the capsule on this node.

    After `make_ready`, `has_nccl` says whether a process uses NCCL under the interposer, `needs_nccl_away` whether the
    images are of use only without its communicators. After `lock`, `tasks` and
    `steps` say what runs here. After `capture`, `meta` is the image's engine section of the manifest; `entry` is its
    entry as soon as it is durable. leave_running: the job goes on after it. full: whether the image shall not refer to
    an earlier one. extra: files for the image beside CRIU's, asked for when all are locked.
    """

    def __init__(
        self,
        job: ProtectedJob,
        worker: WorkerClient,
        *,
        checkpoint: str,
        data_key: str,
        leave_running: bool,
        full: bool = False,
        extra: Callable[[], dict[str, bytes]] = dict,
    ) -> None:
        assert job.capsule is not None
        self._job, self._capsule, self._worker, self._extra = job, job.capsule, worker, extra
        self._checkpoint, self._data_key, self.leave_running = checkpoint, data_key, leave_running
        self._full = full
        self._outputs: list[OpenFile] = []
        self._dump: Dump | None = None
        self._gpus = NodeGpus(self._capsule.job, job.context.config.cuda)
        self._locked = self._resumed = False
        self.staged = asyncio.Event()
        self.tasks: list[shepherd.Task] = []
        self.steps: list[dict[str, Any]] = []
        self.detached = False
        self.entry: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.frozen_at = self.dump_s = self.freeze_s = 0.0
        self.own_s: dict[str, float] = {}
        self._base: dict[str, Any] | None = None
        self._resident = 0
        self.has_nccl = self.needs_nccl_away = False

    @property
    def names(self) -> dict[str, object]:
        """What its lines in the log name."""
        return {"job": self._job.job, "checkpoint": self._checkpoint, "node_rank": self._capsule.node_rank}

    async def prepare(self) -> None:
        """What the first node does: the others join what it has begun in the store."""
        await self.make_ready()
        await self.join()
        self.staged.set()

    @timed
    async def make_ready(self) -> None:
        """READY but for the store."""
        context, capsule, run_dir = self._job.context, self._capsule, self._job.run_dir
        if context.criu is None:
            raise context.criu_problem or Refused(reason="CRIU is not usable on this node")
        processes = namespace_processes(capsule.init_pid)
        if not processes:
            raise CoordinationError(job=capsule.job, reason="it has ended, nothing is left to checkpoint")
        # Both wait for a process to start.
        start = self._worker.start(run_dir.images, stream.CAPTURE_SOCKET, expendable=self.leave_running)
        for failed in await asyncio.gather(self._look(processes), start, return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed
        warm = asyncio.ensure_future(self._gpus.warm())
        if capsule.node_rank == 0:
            await self._worker.call("orphans", job=capsule.job, older_than_s=0)
        resident = resident_bytes([p.pid for p in processes]) + sum(p.bytes for p in self._gpus.processes)
        if not self._full:
            catalog = Catalog(context, self._worker, self._job.store_root)
            every = context.config.store.full_every
            self._base = await catalog.base(capsule.job, capsule.uid, capsule.node_rank, every)
        self._resident = resident
        await self._make_room(resident, full=self._base is None)
        await warm

    async def _look(self, processes: list[Process]) -> None:
        """See what stands against a checkpoint: raises Refused, CudaHostMemory."""
        context, capsule = self._job.context, self._capsule
        await self._gpus.find(processes)
        gpus = context.config.cuda.driver != "off" and not self._gpus.absent
        findings = preflight.check(processes, capsule.root, gpus=gpus, reconnecting=context.config.engine.reconnecting)
        if gpus:
            covered = await nccl.covered(processes, capsule.uid)
            self.has_nccl = bool(covered)
            self.needs_nccl_away = gpu_preflight.must_be_rebuilt(self._gpus, covered)
            findings += gpu_preflight.check(self._gpus, processes, covered)
        if findings:
            raise Refused(reason=preflight.summary(findings))
        gpu_preflight.check_memory(self._gpus)

    @timed
    async def join(self) -> None:
        """Open this node's part of the checkpoint in the store; the first node makes it.

        For a job that goes on the worker gets room for what it reads, so that it can be sealed later. A job that leaves
        is sealed as it is read: its freeze ends with the image.
        """
        room = available_memory() * self._job.context.config.engine.room_percent // 100 if self.leave_running else 0
        problem = await self._worker.call(
            "capture",
            job=self._capsule.job,
            checkpoint=self._checkpoint,
            node_rank=self._capsule.node_rank,
            key=self._data_key,
            begin=self._capsule.node_rank == 0,
            packs=self._job.context.config.store.packs,
            base=self._base,
            room_bytes=room,
            expected_bytes=self._resident,
        )
        if problem is not None:
            log.warning("image is written in full", job=self._capsule.job, reason=problem)
        if self._worker.pid is not None:
            self._job.dumping = DumpProgress(self._worker.pid, self._resident)

    @property
    def has_gpus(self) -> bool:
        """After `make_ready`: whether a process of this node uses a GPU."""
        return bool(self._gpus.processes)

    async def _make_room(self, resident: int, *, full: bool) -> None:
        """Decide before anything is frozen whether the checkpoint will fit, by what the last one took.

        full: it refers to no earlier one.

        Where it will not, older checkpoints of this job go first, all but the newest good one: how many are kept is
        a wish, space is a need. A store that fills up all the same fails the dump cleanly.
        """
        job = self._job
        catalog = Catalog(job.context, self._worker, job.store_root)
        density = await catalog.density(job.job, full=full)
        nodes = len(job.geometry.nodes) if job.geometry is not None and self._capsule.node_rank == 0 else 1
        needed = int(resident * nodes * density.stored) + _RESERVE_BYTES
        free = await self._worker.call("space")
        if free < needed and self._capsule.node_rank == 0:
            gone = await catalog.prune(job.job, 1)
            log.warning("space is low", job=job.job, free=free, needed=needed, removed=",".join(gone))
            free = await self._worker.call("space")
        if free < needed:
            how = "by its last checkpoint" if density.known else "if memory compresses well"
            text = f"{format_bytes(free)} free, about {format_bytes(needed)} needed ({how})"
            raise StoreFull(path=job.store_root, reason=f"{text}; the job holds {format_bytes(resident)} on this node")

    @timed
    async def gpu_lock(self) -> None:
        await self._gpus.lock()

    async def gpu_unlock(self) -> None:
        await self._gpus.unlock()

    @timed
    async def lock(self) -> None:
        job = self._job
        self.detached = True
        self.tasks = await shepherd.detach(job.job, job.context.node, job.run_dir.shepherd_socket)
        job.tasks &= {task.key for task in self.tasks}  # others are started when it goes on
        self.steps = job.steps.state()["on_node"]
        if any(t.key == "batch" and t.status is not None for t in self.tasks):
            raise CoordinationError(job=job.job, reason="it has ended, nothing is left to checkpoint")
        alone = [t.key for t in self.tasks if t.key not in job.supervisors and not self._collected(t)]
        if alone:
            # Slurm is just ending the step, since it has killed the task or its supervisor; or this agent is new.
            raise CutNotPossible(job=job.job, reason=f"task {alone[0]} has no supervisor")
        # Everything is handed on, so their sizes are those of this cut.
        self._outputs = output_files([s.pid for s in job.supervisors.values()])
        self._locked = True
        await network.lock(job.job)

    @timed
    async def capture(self) -> None:
        job, context = self._job, self._job.context
        self._dump = Dump(self._capsule, job.run_dir, self._worker, context.config.engine, beside=job.beside)
        growing = self._growing()
        if growing:
            await self._dump.expect_more()
        # A job that goes on stands still for the driver's copy, and is sealed when it runs.
        async with early.sealing(self._worker, {} if self.leave_running else growing):
            await self._gpus.checkpoint()
        processes = namespace_processes(self._capsule.init_pid)
        self._gpus.verify(processes)
        hung_up = await asyncio.to_thread(
            sockets.hang_up, [p.pid for p in processes], context.config.engine.reconnecting
        )
        if hung_up:
            log.info("hung up, clients connect anew", job=job.job, services=",".join(sorted(set(hung_up))))
        if job.dumping is not None:
            job.dumping.beside_bytes = lambda: self._dump.beside_bytes if self._dump is not None else 0
        try:
            frozen: Frozen = await self._dump.capture()
        except MemoryUnreadable:
            job.beside = False  # the next try is CRIU's alone
            raise
        await reach(Point.FROZEN, job.job)
        there = {p.nspid for p in frozen.processes}
        killed = [t.key for t in self.tasks if t.status is None and t.pid not in there]
        if killed:
            raise CutNotPossible(job=job.job, reason=f"task {killed[0]} ended while the tree was being frozen")
        files = writable_files(frozen.processes, PRIVATE_DIRECTORIES)
        script = self._script()
        about = summary.collect(frozen.processes, self._capsule.init_pid)
        extra = {**self._extra(), summary.SUMMARY_STREAM: about}
        if script is not None:
            extra[batchscript.SCRIPT_STREAM] = script[0]
        for name, content in extra.items():
            await add_bytes(self._worker, name, content)
        assert context.criu is not None
        self.meta = {
            "host": describe_host(context.criu),
            "node": context.node,
            "tree": tree_meta(self._capsule, frozen.processes),
            "tasks": [{"key": t.key, "pid": t.pid} for t in self.tasks if not self._collected(t)],
            "steps": self.steps,
            "files": [f.as_dict() for f in files],
            "outputs": [f.as_dict() for f in self._outputs],
            "gpu": self._gpus.meta(),
        }
        if script is not None:
            self.meta["script"] = {"path": job.script, "mode": script[1]}
        self.frozen_at = frozen.frozen_at
        if not self.leave_running:
            await self._seal()

    def _growing(self) -> dict[int, int]:
        """Processes to which the driver adds much memory that is read beside CRIU."""
        size = sum(p.bytes for p in self._gpus.processes)
        if not self._job.beside or size < large.LARGE_BYTES or not early.possible():
            return {}
        return {p.nspid: p.pid for p in self._gpus.processes}

    @timed
    async def resume(self) -> None:
        """RESUMED. What was read of the job is in the worker's memory or in the store: nothing of it is shared with the
        tasks any more."""
        assert self._dump is not None
        await self._dump.resume()
        self.freeze_s = time.monotonic() - self.frozen_at
        if not self._capsule.alive():
            raise CoordinationError(job=self._job.job, reason="it ended at its checkpoint")
        await self._reopen()
        await self._gpus.go()
        await self._job.go_on(detached=self.detached, message="", phase=Phase.SEALING)
        self.detached, self._resumed = False, True
        self._job.dumping = None

    @timed
    async def seal(self) -> None:
        await self._seal()

    async def _seal(self) -> None:
        self.entry = await self._worker.call("seal")
        self.dump_s = time.monotonic() - self.frozen_at

    def _script(self) -> tuple[bytes, int] | None:
        """Content and mode of the batch script, if it is here and can be had: only a new job would need it."""
        if self._capsule.node_rank != 0 or not self._job.script:
            return None
        try:
            return batchscript.read(self._capsule.inside(self._job.script), self._job.uid)
        except OSError as error:
            log.warning("image without the batch script", job=self._job.job, error=str(error))
            return None

    def _collected(self, task: shepherd.Task) -> bool:
        """Whether a task has ended and Slurm knows it, by itself or with its whole step; the shepherd may still have
        it on its list."""
        key, dot, rank = task.key.partition(".")
        step = next((step for step in self.steps if step["key"] == key), None)
        return bool(dot) and (step is None or rank in step["ended"])

    async def commit(self) -> None:
        self._job.run_dir.leaving.touch()
        self._job.set_phase(Phase.REQUEUEING)
        await reach(Point.MARKED, self._job.job)

    async def finish(self) -> None:
        assert self._dump is not None
        try:
            if not self.leave_running:
                await self._dump.end()
                await reach(Point.ENDED, self._job.job)
        finally:
            self._job.dumping = None
            await self._gpus.close()

    async def undo(self) -> None:
        self._job.dumping = None
        # GPUs not before CRIU has let go: the driver works in threads of the process.
        frozen = (self._worker.abandon, self._thaw, self._reopen, self._gpus.resume, self._gpus.close)
        for step in (self._worker.close, self._gpus.close) if self._resumed else frozen:
            try:
                await step()
            except (GpucrError, OSError) as error:  # what one step leaves must not keep the job frozen or cut off
                log.error("undo failed", job=self._capsule.job, step=step.__name__, error=str(error) or repr(error))

    async def _thaw(self) -> None:
        if self._dump is not None:
            await self._dump.undo()
            remove_link_remaps(self._capsule)

    async def _reopen(self) -> None:
        if self._locked and self._capsule.alive():
            await network.unlock(self._capsule.job)
        self._locked = False


def available_memory() -> int:
    """Bytes of memory that programs on this node can take without any being moved out."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024


def resident_bytes(pids: list[int]) -> int:
    """Memory of processes that a dump must write: their proportional share, so shared pages count once."""
    total_kb = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                for line in file:
                    if line.startswith("Pss:"):
                        total_kb += int(line.split()[1])
        except OSError:
            continue
    return total_kb * 1024
