"""The agent's side of the fill: what lets the worker write to the memory of the restored processes.

Who calls: restore, in CRIU's hook `post-restore`. The agent may write to any process's memory, the worker to none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine import copier
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, RestoreFailed
from gpucr_hpc.log import Log
from gpucr_hpc.wire import MAX_RECORD_FDS

log = Log(__name__)


class Refill:
    """One fill. pids: of the processes whose memory CRIU did not restore, inside the namespace. After a failure
    `failure` has its cause; took_s: seconds."""

    def __init__(self, capsule: Capsule, worker: WorkerClient, pids: Sequence[int]) -> None:
        self._capsule, self._worker, self.pids = capsule, worker, list(pids)
        self.failure: GpucrError | None = None
        self.took_s = 0.0

    async def __call__(self) -> None:
        """Fill everything; on return the tree is whole. Raises RestoreFailed, an ImageError or StoreError, HostError
        when the worker died."""
        started, written = time.monotonic(), 0
        try:
            for at in range(0, len(self.pids), MAX_RECORD_FDS):
                written += await self._fill(self.pids[at : at + MAX_RECORD_FDS])
        except GpucrError as error:
            self.failure = error
            raise
        self.took_s = time.monotonic() - started
        log.info("memory filled", job=self._capsule.job, bytes=written, took_s=self.took_s)

    async def _fill(self, pids: Sequence[int]) -> int:
        there = {p.nspid: p.pid for p in namespace_processes(self._capsule.init_pid)}
        with contextlib.ExitStack() as stack:
            memories, processors, known = [], set[int](), {}
            for nspid in pids:
                try:
                    pid = there[nspid]
                    memories.append(os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC))
                    stack.callback(os.close, memories[-1])
                    processors |= os.sched_getaffinity(pid)
                    known[nspid] = pid
                except (KeyError, OSError) as error:
                    raise RestoreFailed(reason=f"process {nspid} cannot be filled: {error}", log="none") from None
            async with copier.started(self._worker, known, write=True, processors=processors):
                written = await self._worker.call("fill", memories, pids=list(pids), processors=sorted(processors))
        return int(written)
