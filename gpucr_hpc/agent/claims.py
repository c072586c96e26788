"""Jobs that began with another's checkpoint: that no two write to the same files, and what they still need.

A claim is a record of the job as which the tree was first started. Claims are numbered and never changed, so of two
agents that claim in the same moment one gets the number, and the other sees its claim before it takes the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.errors import CheckpointUnfit, JobUnknown, SlurmError
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest

if TYPE_CHECKING:
    from gpucr_hpc.agent.catalog import Catalog, Entry

log = Log(__name__)

#: Record of a job that ended well, but whose checkpoints are not all removed.
RETIRED = "retired"
_HALF_LOOKS, _HALF_PAUSE_S = 20, 0.1  # a claim is written at once where the file system has hard links


def record_name(number: int) -> str:
    """Name of the record of a claim, from 0 on."""
    return f"clone-{number}"


def began_as(manifest: Manifest) -> str:
    """The job as which the tree of a checkpoint was started: its id is in the tree's paths."""
    return str(manifest.meta.get("paths_of", manifest.job))


def written(manifest: Manifest) -> list[str]:
    """Files that the tree has open for writing."""
    return sorted({str(file["path"]) for rank in manifest.meta["ranks"] for file in rank["files"]})


def some(files: Sequence[str]) -> str:
    """Files in a sentence."""
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


async def is_live(job: str) -> bool:
    """Whether a job may still need its checkpoints; yes where Slurm cannot be asked."""
    try:
        return not (await slurm.job(job)).over
    except JobUnknown:
        return False
    except SlurmError as error:
        log.warning("whether a job is over is not known, so it is not", job=job, error=str(error))
        return True


async def all_of(catalog: Catalog, first: str) -> list[dict[str, Any]]:
    """Claims on checkpoints of trees that began as job `first`: job, of (whose checkpoint), checkpoint."""
    found: list[dict[str, Any]] = []
    while (claim := await catalog.record(first, record_name(len(found)))) is not None:
        found.append(claim)
    return found


async def claim(catalog: Catalog, job: str, manifest: Manifest) -> None:
    """Note that `job` begins with this checkpoint. Raises CheckpointUnfit when another job that is not over has the
    same files open for writing; what a program opens later nobody can see.
    """
    first, files = began_as(manifest), written(manifest)
    value = {"job": job, "of": manifest.job, "checkpoint": manifest.checkpoint}
    for _ in range(_HALF_LOOKS):
        others = await all_of(catalog, first)
        for other in dict.fromkeys([first, manifest.job, *(str(claim["job"]) for claim in others)]):
            if files and other != job and await is_live(other):
                reason = f"job {other} is not over and writes to {some(files)}, too: let it end or cancel it first"
                raise CheckpointUnfit(reason=reason)
        if any(claim["job"] == job for claim in others):
            return
        if await catalog.note_new(first, record_name(len(others)), value):
            return
        if await catalog.record(first, record_name(len(others))) is None:
            await asyncio.sleep(_HALF_PAUSE_S)
    raise CheckpointUnfit(reason=f"record {record_name(len(others))} of job {first} in the store cannot be read")


async def needed(catalog: Catalog, entries: Sequence[Entry], *, but: str = "") -> set[str]:
    """Those of these checkpoints of one job with which another one would have to begin again: it is not over and has
    none of its own. but: a job that does not count."""
    found: set[str] = set()
    claims: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry.manifest is None:
            continue
        first = began_as(entry.manifest)
        if first not in claims:
            claims[first] = await all_of(catalog, first)
        for claim in claims[first]:
            if claim["job"] == but or (claim["of"], claim["checkpoint"]) != (entry.job, entry.checkpoint):
                continue
            if await is_live(claim["job"]) and not (await catalog.candidates(claim["job"], entry.manifest.uid))[0]:
                found.add(entry.checkpoint)
    return found


async def release(catalog: Catalog, first: str, job: str) -> None:
    """`job`, whose tree began as job `first`, does not need another's checkpoint any more: remove what was kept for it
    alone of a job that ended well."""
    for claim in await all_of(catalog, first):
        if claim["job"] == job and await catalog.record(claim["of"], RETIRED) is not None:
            await catalog.retire(claim["of"], but=job)
