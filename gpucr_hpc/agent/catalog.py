"""The checkpoints of a job: listed, judged, opened, removed. The store is reached through a worker."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpucr_hpc.agent import claims
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CheckpointMissing, GpucrError
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey, PublicKey, SiteKey
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest
from gpucr_hpc.store.retention import Candidate, removable

log = Log(__name__)

_LATEST, _ORIGIN, _ENDED = "latest", "origin", "ended"
_UNKNOWN_DENSITY = 0.25  # what compression is hoped to leave


@dataclass(frozen=True)
class Density:
    """Stored bytes for each plain one. known: from the job's newest checkpoint, otherwise a hope."""

    stored: float
    known: bool


@dataclass(frozen=True)
class Entry:
    """A complete checkpoint: its manifest, or the reason why it cannot be trusted. data: the manifest's file."""

    job: str
    checkpoint: str
    manifest: Manifest | None
    problem: GpucrError | None = None
    data: bytes = b""


class Keys(Protocol):
    """What a catalog needs of an agent's Context: whose manifests are accepted, and what opens them."""

    @property
    def trusted(self) -> list[PublicKey]: ...

    @property
    def site_keys(self) -> tuple[SiteKey, ...]: ...


class Catalog:
    """The checkpoints in one store, seen through a started worker."""

    def __init__(self, keys: Keys, worker: WorkerClient, root: str) -> None:
        self._keys, self._worker, self._root = keys, worker, root

    async def entries(self, job: str | None = None, checkpoint: str | None = None) -> list[Entry]:
        """Every complete checkpoint, or those of a job or an id, oldest first, good or not."""
        found = []
        for owner, name, text in await self._worker.call("manifests", job=job, checkpoint=checkpoint):
            path = f"{self._root}/{owner}/{name}/manifest"
            data = base64.b64decode(text)
            try:
                manifest = manifest_file.decode(data, path, self._keys.trusted)
                if (manifest.job, manifest.checkpoint) != (owner, name):
                    raise CheckpointMissing(checkpoint=f"{name} (another one lies in its place)", path=path)
                found.append(Entry(owner, name, manifest, data=data))
            except GpucrError as error:
                found.append(Entry(owner, name, None, error, data))
        return found

    async def candidates(self, job: str, uid: int) -> tuple[list[Manifest], list[str]]:
        """Checkpoints from which a job may go on, newest first, and a line for each one that is out.

        Sets of an earlier job of the same number (a cluster whose counter began anew) do not count: they are
        older than the origin that was recorded when this job first ran. A set that was published and has
        gone is a problem too.
        """
        origin = await self.record(job, _ORIGIN) or {}
        latest = await self.record(job, _LATEST) or {}
        entries = [e for e in await self.entries(job) if e.checkpoint >= origin.get("after", "")]
        problems = [str(e.problem) for e in entries if e.problem is not None]
        good = [e.manifest for e in entries if e.manifest is not None]
        problems += [f"checkpoint {m.checkpoint} was made by another release" for m in good if "ranks" not in m.meta]
        good = [m for m in good if "ranks" in m.meta]
        problems += [f"checkpoint {m.checkpoint} belongs to uid {m.uid}, not {uid}" for m in good if m.uid != uid]
        if latest.get("checkpoint") and latest["checkpoint"] not in {e.checkpoint for e in entries}:
            problems.append(str(CheckpointMissing(checkpoint=latest["checkpoint"], path=f"{self._root}/{job}")))
        return [m for m in reversed(good) if m.uid == uid], problems

    async def find(self, checkpoint: str, uid: int) -> Manifest:
        """The user's checkpoint of this id, of whichever job. Raises CheckpointMissing, also for another user's, or
        what is wrong with it."""
        entries = await self.entries(checkpoint=checkpoint)
        for entry in entries:
            if entry.manifest is not None and entry.manifest.uid == uid and "ranks" in entry.manifest.meta:
                return entry.manifest
        for entry in entries:
            if entry.problem is not None:
                raise entry.problem
        raise CheckpointMissing(checkpoint=f"{checkpoint} of uid {uid}", path=self._root)

    async def base(self, job: str, uid: int, node_rank: int, full_every: int) -> dict[str, Any] | None:
        """The job's last image of a node rank, as the worker takes it, when the next one may refer to it."""
        good, _ = await self.candidates(job, uid)
        if not good:
            return None
        manifest = good[0]
        entry = next((image for image in manifest.images if image.node_rank == node_rank), None)
        if entry is None or entry.format < 2 or entry.depth + 1 >= full_every:
            return None
        try:
            return {"checkpoint": manifest.checkpoint, "entry": entry.as_dict(), "key": self.key_of(manifest)}
        except GpucrError:
            return None  # of another site key: nothing in it would be found

    def key_of(self, manifest: Manifest) -> str:
        """The data key of a checkpoint, as the worker takes it; raise KeyFileError for a foreign one."""
        return DataKey.unwrap(manifest.slots, self._keys.site_keys, manifest.checkpoint).reveal_hex()

    async def record(self, job: str, name: str) -> dict[str, Any] | None:
        """A durable note about a job, or None."""
        text = await self._worker.call("record", job=job, name=name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    async def note(self, job: str, name: str, value: dict[str, Any]) -> None:
        """Write a durable note about a job."""
        await self._worker.call("record", job=job, name=name, data=json.dumps(value))

    async def note_new(self, job: str, name: str, value: dict[str, Any]) -> bool:
        """Write a durable note unless there is one of that name; whether it was written."""
        return bool(await self._worker.call("record", job=job, name=name, data=json.dumps(value), new=True))

    async def first_run(self, job: str, after: str, excluded: str, outputs: Sequence[dict[str, Any]] = ()) -> None:
        """Remember when a job ran first: only checkpoints with an id from `after` on are its own. And the nodes
        that its user excluded, and of a job that began with another's checkpoint its output files of then."""
        await self.note(job, _ORIGIN, {"after": after, "excluded": excluded, "outputs": list(outputs)})
        # Of an earlier job of this number.
        gone = [claims.record_name(number) for number in range(len(await claims.all_of(self, job)))]
        for name in (_LATEST, _ENDED, claims.RETIRED, *gone):
            await self._worker.call("record", job=job, name=name, delete=True)

    async def excluded(self, job: str) -> str:
        """Nodes that the user excluded when the job ran first."""
        return str((await self.record(job, _ORIGIN) or {}).get("excluded", ""))

    async def first_outputs(self, job: str) -> list[dict[str, Any]]:
        """Output files as they were when the job ran first, as OpenFile.as_dict made them."""
        return list((await self.record(job, _ORIGIN) or {}).get("outputs", []))

    async def note_latest(self, job: str, checkpoint: str, *, left: bool = False) -> None:
        """Part of a commit: a set that is noted here and has gone later is missed, not forgotten. left: the job was
        requeued right after it and wrote nothing more."""
        await self.note(job, _LATEST, {"checkpoint": checkpoint, "left": left})

    async def left_with(self, job: str) -> str | None:
        """The checkpoint after which the job did not run on, if its latest is such a one."""
        latest = await self.record(job, _LATEST) or {}
        return str(latest["checkpoint"]) if latest.get("left") else None

    async def prune(self, job: str, keep_last: int, *, fresh: str = "") -> list[str]:
        """Remove what is older than the last `keep_last` good checkpoints of a living job, at least one, and is not
        needed by another job; their ids.

        fresh: a checkpoint that was committed just now, which need not be looked at.
        """
        entries = await self.entries(job)
        own = next((entry.manifest for entry in entries if entry.manifest is not None), None)
        if own is not None and claims.began_as(own) != job:
            try:
                await claims.release(self, claims.began_as(own), job)
            except GpucrError as error:  # another job's; this one needs its room
                log.warning("another job's checkpoints not removed", job=job, error=str(error))
        if len(entries) <= max(1, keep_last):
            return []
        candidates = await self.judged(entries, max(1, keep_last), fresh)
        gone = removable(candidates, live=True, now=time.time(), keep_last=keep_last)
        needed = await claims.needed(self, [entry for entry in entries if entry.checkpoint in gone])
        gone = [checkpoint for checkpoint in gone if checkpoint not in needed]
        for checkpoint in gone:
            await self.remove(job, checkpoint)
        return gone

    async def remove(self, job: str, checkpoint: str) -> None:
        """Remove a checkpoint; one that somebody else has removed meanwhile is fine."""
        with contextlib.suppress(CheckpointMissing):
            await self._worker.call("delete", job=job, checkpoint=checkpoint)

    async def judged(self, entries: list[Entry], wanted: int, fresh: str = "") -> list[Candidate]:
        """Entries of one job with a word on each: good when manifest, sizes, index and digests are. Of the newest it is
        looked at until `wanted` are good; those before them are taken at their manifest's word."""
        found: list[Candidate] = []
        for entry in reversed(entries):
            good = entry.manifest is not None
            if good and entry.checkpoint != fresh and sum(c.good for c in found) < wanted:
                good = await self.problem(entry) is None
            found.append(Candidate(entry.checkpoint, good))
        return found[::-1]

    async def problem(self, entry: Entry, *, deep: bool = False) -> GpucrError | None:
        """What is wrong with a checkpoint, if anything; deep: every byte is read and authenticated."""
        if entry.manifest is None:
            return entry.problem or CheckpointMissing(checkpoint=entry.checkpoint, path=f"{self._root}/{entry.job}")
        try:
            key = self.key_of(entry.manifest)
            for image in entry.manifest.images:
                await self._worker.call(
                    "verify", job=entry.job, checkpoint=entry.checkpoint, entry=image.as_dict(), key=key, deep=deep
                )
        except GpucrError as error:
            return error
        return None

    async def density(self, job: str, *, full: bool) -> Density:
        """How much of the plain bytes of a job its newest good checkpoint has stored; a guess when there is none.

        full: for a checkpoint that refers to no earlier one, so the packs that the last one refers to count, too.
        """
        for entry in reversed(await self.entries(job)):
            if entry.manifest is not None and entry.manifest.bytes_plain:
                manifest = entry.manifest
                linked = sum(image.bytes_linked for image in manifest.images) if full else 0
                return Density((manifest.bytes_stored + linked) / manifest.bytes_plain, known=True)
        return Density(_UNKNOWN_DENSITY, known=False)

    async def ended(self, job: str, run: int, status: int) -> None:
        """Remember that a job ended by itself although Slurm was about to requeue it."""
        await self.note(job, _ENDED, {"run": run, "status": status})

    async def ended_before(self, job: str, run: int) -> int | None:
        """wait(2) status with which an earlier run of this job ended by itself in a grace time, or None."""
        note = await self.record(job, _ENDED)
        return int(note["status"]) if note is not None and note["run"] < run else None

    async def retire(self, job: str, *, but: str = "") -> None:
        """The job ended well: remove its checkpoints, except those that another job needs; `claims.release` calls again
        when that has one of its own. but: a job that does not count."""
        entries = await self.entries(job)
        needed = await claims.needed(self, entries, but=but)
        if needed:
            await self.note(job, claims.RETIRED, {})
        for entry in entries:
            if entry.checkpoint not in needed:
                await self.remove(job, entry.checkpoint)
        for name in (_LATEST, *(() if needed else (claims.RETIRED,))):
            await self._worker.call("record", job=job, name=name, delete=True)
