"""Removing checkpoints and remains at somebody's word: `gpucr prune`."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

from gpucr_hpc import slurm
from gpucr_hpc.agent.catalog import Catalog, Entry
from gpucr_hpc.agent.context import Context
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, JobUnknown, SlurmError, UsageError
from gpucr_hpc.log import Log
from gpucr_hpc.store.retention import removable

log = Log(__name__)


class Pruning:
    """Limits as in store.retention.removable. orphans_s: age from which remains go; None leaves them.

    Raises UsageError for limits that would reach into a checkpoint that is being written.
    """

    def __init__(
        self,
        context: Context,
        keep_last: int | None,
        keep_within_s: float | None,
        orphans_s: float | None,
        *,
        dry_run: bool,
    ) -> None:
        longest_s = context.config.engine.dump_timeout_s
        if (keep_last or 0) < 0 or (keep_within_s or 0) < 0:
            raise UsageError(reason="limits cannot be negative")
        if orphans_s is not None and orphans_s < longest_s:
            raise UsageError(reason=f"remains younger than {longest_s:.0f} s (engine.dump_timeout_s) may be in use")
        self._context, self._dry_run, self._orphans_s = context, dry_run, orphans_s
        self._limits: dict[str, Any] = {"keep_last": keep_last, "keep_within_s": keep_within_s}

    async def run(self, worker: WorkerClient, root: str, entries: list[Entry]) -> dict[str, Any]:
        """Remove what may go of these checkpoints, job by job; what went, what stays, and what could not be removed."""
        catalog = Catalog(self._context, worker, root)
        removed: list[dict[str, Any]] = []
        kept = 0
        for job, group in groupby(sorted(entries, key=lambda e: (int(e.job), e.checkpoint)), key=lambda e: e.job):
            own = list(group)
            live = await is_live(job)
            judged = await catalog.judged(own, max(self._limits["keep_last"] or 0, 1 if live else 0))
            gone = removable(judged, live=live, now=time.time(), **self._limits)
            removed += [await self._remove(worker, job, checkpoint, own) for checkpoint in gone]
            kept += len(own) - len(gone)
        return {"dry_run": self._dry_run, "removed": removed, "kept": kept}

    async def _remove(self, worker: WorkerClient, job: str, checkpoint: str, entries: list[Entry]) -> dict[str, Any]:
        manifest = next(e.manifest for e in entries if e.checkpoint == checkpoint)
        record: dict[str, Any] = {"job": job, "checkpoint": checkpoint}
        if manifest is not None:
            record["bytes_stored"] = manifest.bytes_stored
        if not self._dry_run:
            try:
                await worker.call("delete", job=job, checkpoint=checkpoint)
                log.info("checkpoint removed", job=job, checkpoint=checkpoint)
            except GpucrError as error:
                record["problem"] = str(error)
        return record

    async def orphans(self, worker: WorkerClient, jobs: set[str] | None) -> list[dict[str, Any]]:
        """Remove what dead writers and deleters left: of these jobs, or of all."""
        if self._orphans_s is None:
            return []
        found: list[dict[str, Any]] = await worker.call(
            "sweep", older_than_s=self._orphans_s, jobs=None if jobs is None else sorted(jobs), dry_run=self._dry_run
        )
        return found


async def is_live(job: str) -> bool:
    """Whether a job may still need its checkpoints; yes where Slurm cannot be asked."""
    try:
        return not (await slurm.job(job)).over
    except JobUnknown:
        return False
    except SlurmError as error:
        log.warning("whether a job is over is not known, so it is not", job=job, error=str(error))
        return True
