"""This node's part in a checkpoint."""

from __future__ import annotations

import time
from typing import Any

from gpucr_hpc import faults
from gpucr_hpc.agent import shepherd
from gpucr_hpc.agent.context import Context
from gpucr_hpc.capsule import Capsule, RunDir, namespace_processes, network
from gpucr_hpc.capsule.capsule import PRIVATE_DIRECTORIES
from gpucr_hpc.engine import preflight, stream
from gpucr_hpc.engine.dump import Dump, Frozen, remove_link_remaps
from gpucr_hpc.engine.openfiles import writable_files
from gpucr_hpc.engine.restore import describe_host, tree_meta
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CoordinationError, GpucrError, Refused, StoreFull
from gpucr_hpc.log import Log

# Below this much free space no checkpoint is begun: manifests and records must always fit.
_RESERVE_BYTES = 64 << 20

log = Log(__name__)


class LocalParticipant:
    """Implements coordinator.checkpoint.Participant for the capsule on this node.

    After `capture`, `entry` is the image's entry for the manifest and `meta` its engine section.
    """

    def __init__(
        self,
        context: Context,
        capsule: Capsule,
        run_dir: RunDir,
        worker: WorkerClient,
        *,
        checkpoint: str,
        data_key: str,
        leave_running: bool,
    ) -> None:
        self._context, self._capsule, self._run_dir, self._worker = context, capsule, run_dir, worker
        self._checkpoint, self._data_key, self._leave_running = checkpoint, data_key, leave_running
        self._dump: Dump | None = None
        self._locked = False
        self.tasks: list[shepherd.Task] = []
        self.detached = False
        self.entry: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.frozen_at = self.dump_s = 0.0

    async def prepare(self) -> None:
        context, capsule = self._context, self._capsule
        if context.criu is None:
            raise context.criu_problem or Refused(reason="CRIU is not usable on this node")
        processes = namespace_processes(capsule.init_pid)
        if not processes:
            raise CoordinationError(job=capsule.job, reason="it has ended, nothing is left to checkpoint")
        findings = preflight.check(processes, capsule.root)
        if findings:
            raise Refused(reason="; ".join(map(str, findings[:5])))
        await self._worker.start(self._run_dir.images, stream.CAPTURE_SOCKET)
        await self._worker.call("orphans", job=capsule.job, older_than_s=0)
        free, needed = await self._worker.call("space"), resident_bytes([p.pid for p in processes])
        if free < needed // 4 + _RESERVE_BYTES:
            # A quarter is what compression is hoped to leave; a store that fills up later fails the dump cleanly.
            raise StoreFull(path=context.config.store.root, reason=f"{free} bytes free, the job holds {needed}")
        await self._worker.call(
            "capture",
            job=capsule.job,
            checkpoint=self._checkpoint,
            node_rank=capsule.node_rank,
            key=self._data_key,
        )

    async def lock(self) -> None:
        self.detached = True
        self.tasks = await shepherd.detach(
            self._capsule.job, self._context.node, self._run_dir.shepherd_socket
        )
        if any(t.key == "batch" and t.status is not None for t in self.tasks):
            raise CoordinationError(job=self._capsule.job, reason="it has ended, nothing is left to checkpoint")
        self._locked = True
        await network.lock(self._capsule.job)

    async def capture(self) -> None:
        capsule, context = self._capsule, self._context
        self._dump = Dump(capsule, self._run_dir, self._worker, context.config.engine)
        frozen: Frozen = await self._dump.capture()
        faults.reach("frozen")
        files = writable_files(frozen.processes, PRIVATE_DIRECTORIES)
        self.entry = await self._worker.call("seal")
        assert context.criu is not None
        self.meta = {
            "host": describe_host(context.criu),
            "node": context.node,
            "tree": tree_meta(capsule, frozen.processes),
            "tasks": [{"key": t.key, "pid": t.pid} for t in self.tasks],
            "files": [f.as_dict() for f in files],
        }
        self.frozen_at, self.dump_s = frozen.frozen_at, time.monotonic() - frozen.frozen_at

    async def finish(self) -> None:
        assert self._dump is not None
        if self._leave_running:
            await self._dump.resume()
            await self._reopen()
        else:
            await self._dump.end()

    async def undo(self) -> None:
        try:
            await self._worker.abandon()
            if self._dump is not None:
                await self._dump.undo()
                remove_link_remaps(self._capsule)
            await self._reopen()
        except (GpucrError, OSError) as error:
            log.error("undo failed", job=self._capsule.job, error=str(error))

    async def _reopen(self) -> None:
        if self._locked and self._capsule.alive():
            await network.unlock(self._capsule.job)
        self._locked = False


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
