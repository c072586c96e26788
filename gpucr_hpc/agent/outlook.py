"""A word to the user while there is time: what would stand against a checkpoint of the job as it is.

Who calls: the clock, soon after a run began and then seldom. Looked at on the job's first node only; the other nodes of
a job mostly do the same. Jobs that use GPUs: gpuword looks at the rest with these.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine import preflight
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.preflight import Finding
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

# What is gone after this time does not stand against a checkpoint, which tries again.
_AGAIN_S = 3.0


async def tell(job: ProtectedJob) -> None:
    """Look, and look again; say in the job's output what was there both times and was not said before in this run."""
    found = _fresh(await _look(job), job.times.warned)
    if not found:
        return
    await asyncio.sleep(_AGAIN_S)
    still = {_kind(finding) for finding in await _look(job)}
    found = [finding for finding in found if _kind(finding) in still]
    if not found:
        return
    job.times.warned += sorted({_kind(finding) for finding in found})
    job.save()
    log.warning("cannot be checkpointed as it is", job=job.job, reason=preflight.summary(found))
    await job.tell(f"as it is, this job can NOT be checkpointed: {preflight.summary(found)}")


async def _look(job: ProtectedJob) -> list[Finding]:
    """What is there now; nothing when a checkpoint came in between, whose own tools are seen then."""
    capsule = job.capsule
    if capsule is None or job.phase is not Phase.RUNNING:
        return []
    found = await asyncio.to_thread(_findings, capsule, job.context.config.engine.reconnecting)
    return found if job.capsule is capsule and job.phase is Phase.RUNNING and capsule.alive() else []


def _findings(capsule: Capsule, reconnecting: Sequence[str]) -> list[Finding]:
    processes = namespace_processes(capsule.init_pid)
    if procfs.candidates(processes):
        return []
    return preflight.check(processes, capsule.root, reconnecting=reconnecting)


def _fresh(findings: Iterable[Finding], warned: Iterable[str]) -> list[Finding]:
    known = set(warned)
    return [finding for finding in findings if _kind(finding) not in known]


def _kind(finding: Finding) -> str:
    """The same for every process and descriptor with the same trouble."""
    return re.sub(r"[0-9]+", "N", f"{finding.name}: {finding.what}")
