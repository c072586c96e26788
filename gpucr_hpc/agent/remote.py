"""Another node's part in a checkpoint, over one connection: when that ends early, the node undoes by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gpucr_hpc.agent.peers import Peer
from gpucr_hpc.agent.shepherd import Task
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.log import Log

log = Log(__name__)

_UNDO_LIMIT_S = 20.0


class RemoteParticipant:
    """Implements coordinator.checkpoint.Participant; fields as in LocalParticipant.

    staged: set when the first node has begun the checkpoint in the store; others join it then.
    """

    def __init__(
        self,
        job: str,
        peer: Peer,
        staged: asyncio.Event,
        *,
        run: int,
        checkpoint: str,
        data_key: str,
        leave_running: bool,
        full: bool = False,
    ) -> None:
        self._job, self._peer, self._staged = job, peer, staged
        self._fields = {
            "run": run,
            "checkpoint": checkpoint,
            "data_key": data_key,
            "leave_running": leave_running,
            "full": full,
        }
        self._gpus = self.has_nccl = self.needs_nccl_away = False
        self.tasks: list[Task] = []
        self.steps: list[dict[str, Any]] = []
        self.entry: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.frozen_at = self.dump_s = self.freeze_s = 0.0

    async def prepare(self) -> None:
        answer = await self._peer.call("prepare", job=self._job, **self._fields)
        self._gpus, self.has_nccl, self.needs_nccl_away = answer["gpus"], answer["nccl"], answer["nccl_away"]
        await self._staged.wait()
        await self._peer.call("join", job=self._job)

    async def gpu_lock(self) -> None:
        if self._gpus:
            await self._peer.call("gpu_lock", job=self._job)

    async def gpu_unlock(self) -> None:
        if not self._gpus:
            return
        try:
            await self._peer.call("gpu_unlock", job=self._job)
        except GpucrError as error:
            log.warning("a node does not answer, it undoes by itself", job=self._job, error=str(error))

    async def lock(self) -> None:
        answer = await self._peer.call("lock", job=self._job)
        self.tasks, self.steps = [Task(**task) for task in answer["tasks"]], answer["steps"]

    async def capture(self) -> None:
        start = time.monotonic()
        answer = await self._peer.call("capture", job=self._job)
        self.entry, self.meta, self.dump_s = answer["entry"], answer["meta"], answer["dump_s"]
        self.frozen_at = start + answer["frozen_after_s"]

    async def resume(self) -> None:
        self.freeze_s = (await self._peer.call("resume", job=self._job))["freeze_s"]

    async def seal(self) -> None:
        answer = await self._peer.call("seal", job=self._job)
        self.entry, self.dump_s = answer["entry"], answer["dump_s"]

    async def commit(self) -> None:
        await self._peer.call("commit", job=self._job)

    async def finish(self) -> None:
        await self._peer.call("finish", job=self._job)

    async def undo(self) -> None:
        await self._peer.end("undo", _UNDO_LIMIT_S, job=self._job)

    def close(self) -> None:
        self._peer.close()
