"""Failures injected on a real card: whatever breaks, the job runs on, and its GPU with it."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucr_hpc import faults
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.engine.worker_client import WorkerClient
from tests.gpu.base import Place, case, environment, refused, steps, train
from tests.gpu.rig import Job


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _context(job: Job, **engine: Any) -> None:
    """Give the job's agent another engine configuration from now on."""
    context = job.protected.context
    config = replace(context.config, engine=replace(context.config.engine, **engine))
    job.protected.context = replace(context, config=config)


async def _at_point(job: Job, point: str) -> str:
    path = job.rig.base / "fault"
    path.write_text(f"{point} fail\n")
    os.environ[faults.VARIABLE] = str(path)
    try:
        return await refused(job)
    finally:
        del os.environ[faults.VARIABLE]


async def _no_criu(job: Job) -> str:
    kept = job.protected.context.config.engine.criu
    _context(job, criu="/bin/false")
    try:
        return await refused(job)
    finally:
        _context(job, criu=kept)


async def _driver_worker_dies(job: Job, after_s: float) -> str:
    """Its process is killed in the middle of a checkpoint call."""
    whole = NodeGpus.checkpoint

    async def checkpoint(self: NodeGpus) -> None:
        async def kill() -> None:
            await asyncio.sleep(after_s)
            for worker in self._workers.values():
                if worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)

        await asyncio.gather(whole(self), kill())

    with patched(NodeGpus, "checkpoint", checkpoint):
        return await refused(job)


async def _store_worker_dies(job: Job, after_s: float) -> str:
    """The process that writes the image is killed while CRIU streams into it."""
    whole = WorkerClient.call

    async def call(self: WorkerClient, verb: str, *args: Any, **fields: Any) -> Any:
        if verb == "drain" and self._process is not None:
            await asyncio.sleep(after_s)
            self._process.kill()
        return await whole(self, verb, *args, **fields)

    with patched(WorkerClient, "call", call):
        return await refused(job)


async def _hangs(job: Job) -> str:
    """The process is stopped after its lock, so its driver thread cannot answer; it goes on six seconds later, or when
    it is woken for its undo."""
    whole = NodeGpus.checkpoint

    async def checkpoint(self: NodeGpus) -> None:
        os.kill(pid, signal.SIGSTOP)
        await whole(self)

    (pid,) = job.pids()
    later = asyncio.get_running_loop().call_later(6.0, os.kill, pid, signal.SIGCONT)
    try:
        with patched(NodeGpus, "checkpoint", checkpoint):
            return await refused(job)
    finally:
        later.cancel()
        os.kill(pid, signal.SIGCONT)


async def _stopped(job: Job) -> str:
    """A job that is stopped (scontrol suspend) is left alone."""
    (pid,) = job.pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        return await refused(job, limit_s=3.0)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _full_store(job: Job) -> str:
    """The store has no room for the image; found out in the middle of it."""
    small = Path(job.rig.base / "small-store")
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=720m", "tmpfs", str(small)], check=True)
    kept = job.protected.store_root
    context = job.protected.context
    store = replace(context.config.store, root=str(small))
    job.protected.context = replace(context, config=replace(context.config, store=store))
    job.protected.store_root = str(small)
    try:
        return await refused(job)
    finally:
        job.protected.context, job.protected.store_root = context, kept
        subprocess.run(["umount", str(small)], check=True)


async def _cancelled(job: Job, after_s: float) -> str:
    """The agent is told to stop while a checkpoint is under way."""
    work = asyncio.ensure_future(job.checkpoint(leave=False))
    done, _ = await asyncio.wait({work}, timeout=after_s)
    if done:
        await work
        return "done before"
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return "cancelled"


async def _running(job: Job) -> None:
    """State RUNNING, and the log grows."""
    assert job.protected.capsule is not None
    gpus = NodeGpus(job.number, job.rig.cuda)
    await gpus.find(namespace_processes(job.protected.capsule.init_pid))
    try:
        assert [0] == [int(await gpus._state(p)) for p in gpus.processes]
    finally:
        await gpus.close()
    await job.advances(limit_s=20)


@case("failures: the job runs on after each", limit_s=240)
async def failures(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    place.cuda(copy_limit_s=3.0, copy_limit_s_per_gib=0.0)
    job = place.job()
    await job.start(train("--log train.log --steps 4000 --gib 0.5 --width 512 --pause 0.02"), environment())
    await job.advances(limit_s=90)
    tries: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        *(
            (f"fault point {p!r}", lambda p=p: _at_point(job, p))
            for p in (
                "after prepare",
                "after gpu_lock",
                "after lock",
                "gpu checkpointed",
                "criu started",
                "frozen",
                "after capture",
            )
        ),
        ("CRIU does not start", lambda: _no_criu(job)),
        ("driver worker killed at once", lambda: _driver_worker_dies(job, 0.0)),
        ("driver worker killed in the copy", lambda: _driver_worker_dies(job, 0.4)),
        ("store worker killed", lambda: _store_worker_dies(job, 0.1)),
        ("process hangs in the copy", lambda: _hangs(job)),
        ("process is stopped", lambda: _stopped(job)),
        ("store full", lambda: _full_store(job)),
        ("time budget of 0.9 s", lambda: refused(job, leave=True, limit_s=0.9)),
        *((f"cancelled after {s} s", lambda s=s: _cancelled(job, s)) for s in (0.3, 0.7, 1.0, 1.3, 1.6, 2.0)),
    ]
    random.shuffle(tries)
    found: dict[str, str] = {}
    for name, attempt in tries:
        start = time.monotonic()
        found[name] = (await attempt())[:160]
        await _running(job)
        print(f"    {time.monotonic() - start:5.1f} s  {name}: {found[name]}", flush=True)
    await job.checkpoint(leave=True)
    await job.restore(environment())
    await job.advances()
    steps(job)
    return {"injected": len(found), "tries": found}
