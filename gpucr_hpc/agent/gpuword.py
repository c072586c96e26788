"""A word to the user soon after a job began to use GPUs: whether it could be checkpointed as it is.

Looked at on the job's first node only; the other nodes of a job mostly do the same.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine import preflight
from gpucr_hpc.engine.cuda import preflight as gpu_preflight
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.engine.nccl import node as nccl
from gpucr_hpc.errors import CudaDriverUnusable, CudaHostMemory, GpucrError
from gpucr_hpc.log import Log
from gpucr_hpc.units import format_bytes

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

# Until a GPU is in use, the last one again and again; some milliseconds of work each.
_POLL_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
# And then: ranks may join a communicator some time after their first use of a GPU.
_LOOKS_S = (5.0, 15.0, 40.0)


@dataclass(frozen=True)
class Use:
    """GPU processes, their GPU memory in bytes, and what stands against a checkpoint (empty: nothing)."""

    processes: int
    bytes: int
    problem: str


async def watch(job: ProtectedJob) -> None:
    """Wait for the job's first use of a GPU, look at it, and say in its output what was found: once in its life."""
    if job.gpu_word or job.context.config.cuda.driver == "off" or NodeGpus(job.job, job.context.config.cuda).absent:
        return
    found = None
    async for use in _uses(job):
        found = use or found
        if use is not None and use.problem:
            break
    supervisor = job.supervisors.get("batch")
    if found is None or supervisor is None:
        return
    job.gpu_word = True
    job.save()
    await supervisor.print(text(found))


def text(use: Use) -> str:
    """What the user reads."""
    processes = "1 process" if use.processes == 1 else f"{use.processes} processes"
    what = f"{processes} of this job on this node {'uses' if use.processes == 1 else 'use'} GPUs"
    if use.problem:
        return f"{what}; as it is, it is NOT protected and cannot be moved: {use.problem}"
    return f"{what}, {format_bytes(use.bytes)} of GPU memory: it can be checkpointed as it is"


async def _uses(job: ProtectedJob) -> AsyncIterator[Use | None]:
    """What is found at each look, None while no GPU is in use; ends with the capsule, or after the last look."""
    capsule = job.capsule
    polls, looks = itertools.chain(_POLL_S, itertools.repeat(_POLL_S[-1])), iter(_LOOKS_S)
    seen = False
    while True:
        wait_s = next(looks, None) if seen else next(polls)
        if wait_s is None:
            return
        await asyncio.sleep(wait_s)
        if capsule is None or job.capsule is not capsule or not capsule.alive():
            return
        if job.phase is not Phase.RUNNING:
            continue
        try:
            use = await look(job, capsule)
        except GpucrError as error:
            log.warning("GPU use not looked at", job=job.job, error=str(error))
            continue
        if use is not None and not seen:
            seen = True  # the first look proper comes a moment later
            continue
        yield use


async def look(job: ProtectedJob, capsule: Capsule) -> Use | None:
    """The GPU processes as they are now; None when there are none. Raises GpucrError when the driver does not say."""
    processes = namespace_processes(capsule.init_pid)
    maybe = procfs.candidates(processes)
    if not maybe:
        return None
    gpus = NodeGpus(job.job, job.context.config.cuda)
    try:
        await gpus.find(processes)
        if not gpus:
            return None
        reconnecting = job.context.config.engine.reconnecting
        findings = preflight.check(processes, capsule.root, gpus=True, reconnecting=reconnecting)
        covered = await nccl.covered(processes, capsule.uid)
        findings += gpu_preflight.check(gpus, processes, covered)
        problem = preflight.summary(findings)
        try:
            gpu_preflight.check_memory(gpus)
        except CudaHostMemory as error:
            problem = f"{problem}; {error}" if problem else str(error)
        return Use(len(gpus.processes), sum(p.bytes for p in gpus.processes), problem)
    except CudaDriverUnusable as error:
        return Use(len(maybe), 0, str(error))
    finally:
        await gpus.close()
