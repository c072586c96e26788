"""What the command line asks of an agent: one JSON request a line, answered by JSON lines, the last one of type
`result` or `exit_error`. Who asks is what the kernel says of the peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import stat
import time
from collections.abc import Callable
from typing import Any

from gpucr_hpc import slurm, wire
from gpucr_hpc.agent.catalog import Catalog, Entry
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.orders import Orders
from gpucr_hpc.agent.pruning import Pruning
from gpucr_hpc.errors import CheckpointMissing, GpucrError, PermissionRefused, SlurmError, StoreError, UsageError
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest, check_job_id

log = Log(__name__)

_REQUEST_LIMIT_S = 10.0


class Control:
    """Serves the control socket."""

    def __init__(self, context: Context, jobs: dict[str, ProtectedJob], operators: set[int], orders: Orders) -> None:
        self._context, self._jobs, self._operators, self._orders = context, jobs, operators, orders

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of one connection."""

        def say(record: dict[str, Any]) -> None:
            writer.write(json.dumps(record).encode() + b"\n")

        try:
            peer = wire.peer_of(writer.get_extra_info("socket"))
            try:
                line = await asyncio.wait_for(reader.readline(), _REQUEST_LIMIT_S)
            except OSError as error:  # nobody is there to be answered
                log.warning("no request came", pid=peer.pid, uid=peer.uid, error=repr(error))
                return
            request = json.loads(line)
            verb = str(request.pop("op", ""))
            method = getattr(self, f"do_{verb}", None)
            if method is None:
                raise UsageError(reason=f"the agent does not know {verb!r}")
            if isinstance(request.get("job"), str):
                request["job"] = await slurm.plain_id(request["job"])
            say({"type": "result", **await method(peer.uid, say, **request)})
        except GpucrError as error:
            say(error.as_dict())
        except (ValueError, TypeError) as error:
            say(UsageError(reason=f"bad request: {error}").as_dict())
        except Exception as error:
            log.exception("request failed")
            say(GpucrError(reason=repr(error)).as_dict())
        finally:
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

    def _everything(self, uid: int) -> bool:
        return uid == 0 or uid in self._operators

    async def do_status(
        self,
        uid: int,
        _say: Callable[..., None],
        job: str | None = None,
        everywhere: bool = False,
        nodes: list[str] | None = None,
    ) -> dict[str, Any]:
        """The protected jobs that the caller may see: of this node, of those named, of all; or one job, wherever it
        runs."""
        if job is not None:
            return await self._orders.status_of(uid, job)
        if everywhere or nodes is not None:
            return {"nodes": await self._orders.status_everywhere(uid, nodes)}
        return await self._orders.status(uid)

    async def do_checkpoint(self, uid: int, say: Callable[..., None], job: str, **fields: Any) -> dict[str, Any]:
        """Checkpoint a job now, wherever it runs; with requeue it leaves its nodes, with stop it is held as well."""
        return {"checkpoint": await self._orders.checkpoint_of(uid, say, job, **fields)}

    async def _place(self, uid: int, job: str | None, directory: str | None) -> tuple[str, int, int]:
        """Store root and the identity with which it is read for a caller."""
        if directory:
            root = self._context.store_root(directory)
            if uid == 0:
                return root, *_owner_of(root)
            owner = pwd.getpwuid(uid)
            return root, owner.pw_uid, owner.pw_gid
        live = self._jobs.get(job or "")
        if live is not None and live.may(uid, self._operators):
            return live.store_root, live.uid, live.gid
        return self._context.config.store.root, uid, 0

    async def _entries(self, uid: int, job: str | None, directory: str | None) -> list[tuple[str, Entry]]:
        root, owner, group = await self._place(uid, job, directory)
        async with self._context.worker(root, owner, group) as worker:
            entries = await Catalog(self._context, worker, root).entries(job)
        visible = []
        for entry in entries:
            owner_uid = entry.manifest.uid if entry.manifest else await self._owner(entry.job)
            if self._everything(uid) or owner_uid == uid:
                visible.append((root, entry))
        return visible

    async def _owner(self, job: str) -> int | None:
        """Whose job it is when its manifest cannot be read; None when Slurm does not know it."""
        try:
            return (await slurm.job(job)).uid
        except SlurmError:
            return None

    async def do_list(
        self, uid: int, _say: Callable[..., None], job: str | None = None, directory: str | None = None
    ) -> dict[str, Any]:
        """Checkpoints that the caller may see, damaged ones with their problem."""
        if job is not None:
            check_job_id(job)
        entries = await self._entries(uid, job, directory)
        return {"checkpoints": [summary(entry, root) for root, entry in entries]}

    async def do_show(
        self, uid: int, _say: Callable[..., None], checkpoint: str, directory: str | None = None
    ) -> dict[str, Any]:
        """One checkpoint in full."""
        for root, entry in await self._entries(uid, None, directory):
            if entry.checkpoint == checkpoint:
                if entry.manifest is None:
                    raise entry.problem or CheckpointMissing(checkpoint=checkpoint, path=root)
                return {"manifest": public(entry.manifest), "store": root}
        raise CheckpointMissing(checkpoint=checkpoint, path=self._context.config.store.root)

    async def do_verify(
        self,
        uid: int,
        say: Callable[..., None],
        checkpoints: list[str] | None = None,
        job: str | None = None,
        deep: bool = False,
        directory: str | None = None,
    ) -> dict[str, Any]:
        """Check checkpoints against their manifests: those named, of a job, or all that the caller may see; deep reads
        and authenticates every byte. Every one is looked at, whatever the others are."""
        entries = await self._chosen(uid, checkpoints, job, directory)
        total = sum(entry.manifest.bytes_stored for _, entry in entries if entry.manifest is not None)
        results, done, started = [], 0, time.monotonic()
        root, owner, group = await self._place(uid, job, directory)
        async with self._context.worker(root, owner, group) as worker:
            catalog = Catalog(self._context, worker, root)
            for _, entry in entries:
                problem = await catalog.problem(entry, deep=deep)
                results.append({"job": entry.job, "checkpoint": entry.checkpoint, "good": problem is None})
                if problem is not None:
                    results[-1]["problem"] = problem.as_dict()
                done += entry.manifest.bytes_stored if entry.manifest is not None else 0
                record = {"checkpoint": entry.checkpoint, "done_bytes": done, "total_bytes": total}
                say({"type": "progress", **record, "seconds": time.monotonic() - started})
        return {"deep": deep, "good": all(r["good"] for r in results), "checkpoints": results}

    async def _chosen(
        self, uid: int, checkpoints: list[str] | None, job: str | None, directory: str | None
    ) -> list[tuple[str, Entry]]:
        """Checkpoints by id, all of them without ids; CheckpointMissing for one that the caller cannot see."""
        if job is not None:
            check_job_id(job)
        entries = await self._entries(uid, job, directory)
        if not checkpoints:
            return entries
        missing = set(checkpoints) - {entry.checkpoint for _, entry in entries}
        if missing:
            raise CheckpointMissing(checkpoint=sorted(missing)[0], path=directory or self._context.config.store.root)
        return [(root, entry) for root, entry in entries if entry.checkpoint in checkpoints]

    async def do_inspect(
        self, uid: int, _say: Callable[..., None], checkpoint: str, directory: str | None = None
    ) -> dict[str, Any]:
        """What a checkpoint holds, for its owner: processes, descriptors and memory by kind, no page of it."""
        ((root, entry),) = await self._chosen(uid, [checkpoint], None, directory)
        if entry.manifest is None:
            raise entry.problem or CheckpointMissing(checkpoint=checkpoint, path=root)
        manifest = entry.manifest
        async with self._context.worker(root, manifest.uid, manifest.gid) as worker:
            key = Catalog(self._context, worker, root).key_of(manifest)
            images = [
                await worker.call("inspect", job=entry.job, checkpoint=checkpoint, entry=image.as_dict(), key=key)
                for image in manifest.images
            ]
        return {"manifest": public(manifest), "store": root, "images": images}

    async def do_prune(
        self,
        uid: int,
        _say: Callable[..., None],
        job: str | None = None,
        keep_last: int | None = None,
        keep_within_s: float | None = None,
        orphans_s: float | None = None,
        directory: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove checkpoints of the jobs that the caller may see, and remains of writers and deleters that died."""
        pruning = Pruning(self._context, keep_last, keep_within_s, orphans_s, dry_run=dry_run)
        entries = await self._chosen(uid, None, job, directory)
        root, owner, group = await self._place(uid, job, directory)
        async with self._context.worker(root, owner, group) as worker:
            report = await pruning.run(worker, root, [entry for _, entry in entries])
            own = {entry.job for _, entry in entries}
            if job is not None and (self._everything(uid) or await self._owner(job) == uid):
                own.add(job)
            report["orphans"] = await pruning.orphans(worker, None if self._everything(uid) and not job else own)
        return report

    async def do_probe_store(self, uid: int, _say: Callable[..., None]) -> dict[str, Any]:
        """Write to the store as its account, for `gpucr doctor`."""
        if not self._everything(uid):
            raise PermissionRefused(who=f"uid {uid}", action="probe the store")
        root = self._context.config.store.root
        async with self._context.worker(root, 0, 0) as worker:
            probe = await worker.call("probe")
            return {"root": root, "free_bytes": await worker.call("space"), **probe}


def _owner_of(directory: str) -> tuple[int, int]:
    """As whom root looks into a user's store: a user who puts a link there meanwhile leads nobody but himself."""
    try:
        status = os.stat(directory, follow_symlinks=False)
    except OSError as error:
        raise StoreError(path=directory, reason=error.strerror) from None
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(path=directory, reason="not a directory")
    return status.st_uid, status.st_gid


def summary(entry: Entry, root: str) -> dict[str, Any]:
    """A checkpoint in a list."""
    manifest = entry.manifest
    record: dict[str, Any] = {"job": entry.job, "checkpoint": entry.checkpoint, "store": root}
    if manifest is None:
        return record | {"state": "damaged", "problem": str(entry.problem)}
    return record | {
        "state": "complete",
        "created": manifest.created,
        "uid": manifest.uid,
        "reason": manifest.reason,
        "run": manifest.run,
        "nodes": [rank["node"] for rank in manifest.meta["ranks"]],
        "bytes_plain": manifest.bytes_plain,
        "bytes_stored": manifest.bytes_stored,
    }


def public(manifest: Manifest) -> dict[str, Any]:
    """A manifest without its key slots."""
    return {k: v for k, v in manifest.as_dict().items() if k != "slots"}
