"""The GPU processes of one capsule on this node, through one checkpoint or restore.

Order: find, lock (all ranks of the job, on every node, before any network is locked), checkpoint, verify, then CRIU.
The way back from anywhere is `resume`: it asks the driver for the state of each process and leads it to RUNNING, so it
does not matter what failed, or which agent had begun. One worker process for each GPU process: all work at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gpucr_hpc.capsule.processes import Process, read_process
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import inventory as inventories
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.client import CudaWorker, driver_kind
from gpucr_hpc.engine.cuda.driver import State
from gpucr_hpc.engine.cuda.inventory import Gpu, Inventory
from gpucr_hpc.errors import (
    CudaCallFailed,
    CudaDriverUnusable,
    CudaError,
    CudaHung,
    CudaMemoryTaken,
    CudaNotReady,
    CudaNotSupported,
    CudaProcessFailed,
    CutNotPossible,
    GpucrError,
    HostError,
)
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.log import Log
from gpucr_hpc.units import format_bytes

log = Log(__name__)

_LOOK_LIMIT_S = 10.0
_STATE_LIMIT_S = 10.0
_START_LIMIT_S = 60.0
_WAKE_LIMIT_S = 15.0
_LOCK_GRACE_S = 5.0
_RESUME_LIMIT_S = 120.0
_PROBE_MS, _PROBE_TRIES = 2000, 5


@dataclass(frozen=True)
class GpuProcess:
    """pid on the host, nspid in the capsule. cards: minor numbers that it has open. bytes: its GPU memory.

    thread: the driver's own in it, by its number in the capsule.
    """

    pid: int
    nspid: int
    name: str
    cards: tuple[int, ...] = ()
    bytes: int = 0
    thread: int = 0


class NodeGpus:
    """Empty (`processes`) for a job without GPUs, and then every step is nothing and no worker is started."""

    def __init__(self, job: str, config: CudaConfig) -> None:
        self._job, self._config = job, config
        self._kind = driver_kind(config.driver)
        # No process need be looked at then, not while the job stands still either.
        self.absent = self._kind == config.driver and not procfs.driver_loaded()
        self._workers: dict[int, CudaWorker] = {}
        self._spare: list[CudaWorker] = []
        self.inventory: Inventory | None = None
        self.processes: list[GpuProcess] = []
        self.took_s: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.processes)

    # --- before ---------------------------------------------------------------------------------------------

    async def find(self, processes: list[Process], *, orphaned: bool = False) -> None:
        """Look for the GPU processes among all of the capsule; those known stay.

        orphaned: stopped ones may have been left so by an agent that died; they are let go on first.
        """
        if self.absent or self._config.driver == "off":
            return
        maybe = procfs.candidates(processes)
        known = {p.pid for p in self.processes}
        wanted = [p for p in maybe if p.pid not in known]
        if not wanted:
            return
        stopped = next((p for p in wanted if p.state in "Tt"), None)
        if orphaned and self._config.stop_threads:
            for p in wanted:
                if p.state == "T":
                    os.kill(p.pid, signal.SIGCONT)
        elif stopped is not None:
            # Its driver thread cannot answer, and the question would hang.
            raise CutNotPossible(job=self._job, reason=f"{stopped.name} (pid {stopped.nspid}) is stopped")
        first = self._worker(wanted[0].pid)
        found = dict(await first.call("look", _LOOK_LIMIT_S, pids=[p.pid for p in wanted]))
        if found and self.inventory is None:
            self.inventory = Inventory.from_dict(await first.call("inventory", _START_LIMIT_S))
        used = self.inventory.used if self.inventory is not None else {}
        for p in wanted:
            if p.pid in found:
                cards = tuple(procfs.cards(p.pid))
                self.processes.append(GpuProcess(p.pid, p.nspid, p.name, cards, used.get(p.pid, 0), found[p.pid]))

    def _worker(self, pid: int) -> CudaWorker:
        if pid not in self._workers:
            self._workers[pid] = self._spare.pop() if self._spare else CudaWorker(self._kind)
        return self._workers[pid]

    async def warm(self) -> None:
        """Start every worker, cuInit included, beside what else must be waited for; failures come out later."""
        await asyncio.gather(
            *(self._worker(p.pid).call("warm", _START_LIMIT_S) for p in self.processes), return_exceptions=True
        )

    def seen(self) -> list[Gpu]:
        """The cards that the processes have open: those that a restore must name."""
        assert self.inventory is not None
        minors = {minor for p in self.processes for minor in p.cards}
        found = [gpu for gpu in self.inventory.gpus if gpu.minor in minors]
        return found or list(self.inventory.gpus)

    def given(self) -> list[str]:
        """UUIDs of the job's own cards, in its order."""
        assert self.inventory is not None
        found: list[str] = []
        for p in self.processes:
            for gpu in inventories.allocated(procfs.environment(p.pid), self.inventory.gpus):
                if gpu.uuid not in found:
                    found.append(gpu.uuid)
        return found

    def meta(self) -> dict[str, Any] | None:
        """What a restore must know, for the manifest; None without GPUs."""
        if not self.processes or self.inventory is None:
            return None
        return {
            "driver": self.inventory.driver,
            "gpus": [vars(gpu) for gpu in self.seen()],
            "given": self.given(),
            "processes": [{"nspid": p.nspid, "bytes": p.bytes, "thread": p.thread} for p in self.processes],
            "took_s": self.took_s,
        }

    # --- there ----------------------------------------------------------------------------------------------

    async def lock(self) -> None:
        """Let work on every GPU come to rest, with a short limit; also of processes that began just now.

        Raises CutNotPossible after unlocking those that were locked: a rank that waits in a collective for one that
        is locked never comes to rest, so all must go on and be tried at another moment.
        """
        if not self.processes:
            return
        limit_ms = self._config.lock_timeout_ms
        results = await asyncio.gather(
            *(self._call(p, "lock", limit_ms / 1000 + _LOCK_GRACE_S, timeout_ms=limit_ms) for p in self.processes),
            return_exceptions=True,
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if not errors:
            return
        await self.unlock()
        serious = next((e for e in errors if not isinstance(e, CudaNotReady)), None)
        if serious is not None:
            raise serious
        raise CutNotPossible(job=self._job, reason=str(errors[0]))

    async def unlock(self) -> None:
        """Let all go on after a lock alone; must not raise."""
        await self._quietly(self._to_running)

    async def checkpoint(self) -> None:
        """Copy GPU memory to the host, all processes at once; they must be locked and not stopped."""
        start = time.monotonic()
        await self._all(self._checkpoint)
        self.took_s["checkpoint"] = round(time.monotonic() - start, 3)
        await reach(Point.GPUS_SAVED, self._job)

    async def _checkpoint(self, process: GpuProcess) -> None:
        try:
            await self._call(process, "checkpoint", self.limit_s(process))
        except CudaNotSupported as error:
            if procfs.maps_managed_memory(process.pid):
                error.fields["reason"] = f"it uses managed memory (cudaMallocManaged); {error.fields['reason']}"
            raise
        except CudaCallFailed as error:
            # Seen once in some 60 checkpoints, on cards that another job used too; the next one worked.
            if "OPERATING_SYSTEM" in str(error):
                raise CutNotPossible(job=self._job, reason=str(error)) from None
            raise
        if self._config.stop_threads and not procfs.under_job_control(process.pid):
            await self._call(process, "stop", _STATE_LIMIT_S)

    @asynccontextmanager
    async def _awake(self, process: GpuProcess) -> AsyncIterator[None]:
        """While the driver works in a process that `_checkpoint` has stopped, no other thread of it runs."""
        held = self._config.stop_threads and await self._call(process, "wake", _WAKE_LIMIT_S, thread=process.thread)
        try:
            yield
        finally:
            if held:
                await self._worker(process.pid).call("release", _STATE_LIMIT_S)

    def verify(self, processes: Sequence[Process]) -> None:
        """Raise when a process of the capsule still holds a device: CRIU would refuse it, or lose what is behind it."""
        if self.absent:
            return
        own = {p.pid for p in self.processes}
        for process in processes:
            for what, path in procfs.devices(process.pid):
                if process.pid in own:
                    reason = f"{what} is {path}, which cannot be saved"
                    raise CudaNotSupported(pid=process.nspid, call="Checkpoint", reason=reason)
                reason = f"{process.name} (pid {process.nspid}) has just begun to use a GPU ({path})"
                raise CutNotPossible(job=self._job, reason=reason)

    def limit_s(self, process: GpuProcess) -> float:
        """Time limit of a copy: grows with the memory, at a tenth of the slowest rate that was seen."""
        gib = process.bytes / (1 << 30)
        return self._config.copy_limit_s + gib * self._config.copy_limit_s_per_gib

    # --- and back -------------------------------------------------------------------------------------------

    async def expect(self, meta: dict[str, Any], env: dict[str, str]) -> dict[str, str]:
        """Before CRIU's restore: start workers, look at this node's cards, return the map from the old ones.

        env: of a process that Slurm gave the cards to. Raises CudaMapImpossible or CudaDriverUnusable, with nothing
        made.
        """
        if self.inventory is None:
            self._spare = [CudaWorker(self._kind) for _ in meta["processes"]]
            self.inventory = Inventory.from_dict(await self._spare[0].call("inventory", _START_LIMIT_S))
        here = self.inventory
        if here.driver != meta["driver"]:
            # The library is mapped in the job's processes, and CRIU wants the same file.
            raise CudaDriverUnusable(reason=f"the job ran with driver {meta['driver']}, this node has {here.driver}")
        old = [Gpu(**gpu) for gpu in meta["gpus"]]
        new_given = [gpu.uuid for gpu in inventories.allocated(env, here.gpus)]
        return inventories.complete_map(old, meta["given"], here.gpus, new_given)

    async def warm_spare(self) -> None:
        """cuInit in the waiting workers, beside CRIU's restore; failures come out later."""
        await asyncio.gather(*(w.call("warm", _START_LIMIT_S) for w in self._spare), return_exceptions=True)

    def came_back(self, meta: dict[str, Any], processes: list[Process]) -> None:
        """Which processes those of the image are now, by their pids in the capsule."""
        by_nspid = {p.nspid: p for p in processes}
        for entry in meta["processes"]:
            process = by_nspid.get(entry["nspid"])
            if process is None:
                raise CudaCallFailed(pid=entry["nspid"], call="Restore", reason="the process did not come back")
            self.processes.append(
                GpuProcess(
                    process.pid, process.nspid, process.name, bytes=entry["bytes"], thread=entry.get("thread", 0)
                )
            )

    async def restore(self, gpus: dict[str, str]) -> None:
        """Bring GPU memory back after CRIU's restore; all stay locked until `unlock`. gpus: see complete_map."""
        start = time.monotonic()
        await self._all(lambda p: self._restore(p, gpus))
        self.took_s["restore"] = round(time.monotonic() - start, 3)

    async def _restore(self, process: GpuProcess, gpus: dict[str, str]) -> None:
        async with self._awake(process):
            await self._restore_awake(process, gpus)

    async def _restore_awake(self, process: GpuProcess, gpus: dict[str, str]) -> None:
        state = await self._state(process)
        if state is not State.CHECKPOINTED:
            raise CudaCallFailed(pid=process.nspid, call="Restore", reason=f"it came back as {state.name}")
        deadline = time.monotonic() + self._config.memory_wait_s
        while True:
            try:
                await self._call(process, "restore", self.limit_s(process), gpus=gpus)
                return
            except (CudaMemoryTaken, CudaCallFailed) as error:
                taken = await self._memory_taken(process, error)
                if time.monotonic() > deadline or await self._state(process) is not State.CHECKPOINTED:
                    raise taken or error from None
                if taken is None:
                    raise
                await asyncio.sleep(1.0)

    async def _memory_taken(self, process: GpuProcess, error: CudaError) -> CudaMemoryTaken | None:
        """Whether a restore failed for lack of GPU memory: the driver says so in several ways, 304 among them."""
        table = await self._worker(process.pid).call("inventory", _START_LIMIT_S)
        free = [(g.memory_bytes - g.used_bytes, g.index) for g in Inventory.from_dict(table).gpus]
        if isinstance(error, CudaMemoryTaken) or not free or min(free)[0] >= process.bytes:
            return error if isinstance(error, CudaMemoryTaken) else None
        most = f"GPU {min(free)[1]} has {format_bytes(min(free)[0])} free, {format_bytes(process.bytes)} are needed"
        return CudaMemoryTaken(pid=process.nspid, reason=f"{most}; {error.fields['reason']}")

    async def go(self) -> None:
        """Let all run after `restore`, and see that they do: raises what the driver says otherwise."""
        await self._all(self._to_running)

    async def resume(self, gpus: dict[str, str] | None = None) -> None:
        """Whatever was reached: lead every process back to RUNNING; must not raise.

        The processes must be able to run: CRIU has let go of them. gpus: None means on the cards they had.
        """
        await self._quietly(lambda p: self._to_running(p, gpus))

    async def _to_running(self, process: GpuProcess, gpus: dict[str, str] | None = None) -> None:
        """Ask, act, ask again: a call that was cut off may still take effect a moment later."""
        deadline = time.monotonic() + _RESUME_LIMIT_S + self.limit_s(process)
        last: GpucrError | None = None
        while time.monotonic() < deadline:
            try:
                async with self._awake(process):
                    state = await self._state(process)
                    if state is State.RUNNING:
                        return
                    if state is State.FAILED:
                        raise CudaProcessFailed(pid=process.nspid, call=str(last or "a call"))
                    if state is State.CHECKPOINTED:
                        await self._call(process, "restore", self.limit_s(process), gpus=gpus or {})
                    await self._call(process, "unlock", _STATE_LIMIT_S)
            except CudaProcessFailed:
                raise
            except (CudaError, HostError) as error:
                if read_process(process.pid) is None:
                    return  # it has ended
                last = error
                log.warning("GPU process not yet back", job=self._job, pid=process.nspid, error=str(error))
                await asyncio.sleep(0.5)
        raise last or CudaHung(pid=process.nspid, call="unlock", limit_s=_RESUME_LIMIT_S)

    async def probe(self) -> list[str]:
        """See that work on every GPU completes: a lock waits for it. Returns a line for each that could not be seen.

        Raises CudaProcessFailed when the driver has given one up.
        """
        lines: list[str] = []
        for process in self.processes:
            for attempt in range(_PROBE_TRIES):
                state = await self._state(process)
                if state is State.FAILED:
                    raise CudaProcessFailed(pid=process.nspid, call="the restore")
                try:
                    await self._call(process, "lock", _PROBE_MS / 1000 + _LOCK_GRACE_S, timeout_ms=_PROBE_MS)
                    break
                except CudaNotReady:
                    if attempt == _PROBE_TRIES - 1:
                        lines.append(f"pid {process.nspid}: its GPU has been busy since the restore")
                finally:
                    await self._to_running(process)
        return lines

    # --- how ------------------------------------------------------------------------------------------------

    async def _state(self, process: GpuProcess) -> State:
        return State(await self._call(process, "state", _STATE_LIMIT_S))

    async def _call(self, process: GpuProcess, verb: str, limit_s: float, **fields: Any) -> Any:
        """As CudaWorker.call, with pids of the capsule in errors. A first call waits for the worker's start, too."""
        worker = self._worker(process.pid)
        if worker.pid is None:
            await worker.call("warm", _START_LIMIT_S)
        try:
            return await worker.call(verb, limit_s, pid=process.pid, **fields)
        except CudaError as error:
            error.fields["pid"] = process.nspid
            raise

    async def _all(self, work: Callable[[GpuProcess], Awaitable[Any]]) -> None:
        results = await asyncio.gather(*(work(p) for p in self.processes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _quietly(self, work: Callable[[GpuProcess], Awaitable[Any]]) -> None:
        results = await asyncio.gather(*(work(p) for p in self.processes), return_exceptions=True)
        for process, result in zip(self.processes, results, strict=True):
            if isinstance(result, BaseException):
                log.error("GPU process does not come back", job=self._job, pid=process.nspid, error=str(result))

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(w.close() for w in (*self._workers.values(), *self._spare)))
        self._workers.clear()
        self._spare.clear()
