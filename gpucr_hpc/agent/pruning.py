"""Removing checkpoints and remains at somebody's word: `gpucr prune`."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

from gpucr_hpc.agent import claims
from gpucr_hpc.agent.catalog import Catalog, Entry
from gpucr_hpc.agent.context import Context
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, UsageError
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
            live = await claims.is_live(job)
            judged = await catalog.judged(own, max(self._limits["keep_last"] or 0, 1 if live else 0))
            gone = removable(judged, live=live, now=time.time(), **self._limits)
            kept_for_others = await claims.needed(catalog, [entry for entry in own if entry.checkpoint in gone])
            gone = [checkpoint for checkpoint in gone if checkpoint not in kept_for_others]
            removed += [await self._remove(catalog, job, checkpoint, own) for checkpoint in gone]
            kept += len(own) - len(gone)
        return {"dry_run": self._dry_run, "removed": removed, "kept": kept}

    async def _remove(self, catalog: Catalog, job: str, checkpoint: str, entries: list[Entry]) -> dict[str, Any]:
        manifest = next(e.manifest for e in entries if e.checkpoint == checkpoint)
        record: dict[str, Any] = {"job": job, "checkpoint": checkpoint}
        if manifest is not None:
            record["bytes_stored"] = manifest.bytes_stored
        if not self._dry_run:
            try:
                await catalog.remove(job, checkpoint)
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
