"""The contract of a store. Every store passes tests/contract/test_store.py.

Who calls: the coordinator (begin, publish, delete), agents on other nodes (attach), restore (list, open).
A checkpoint is either listed and complete, or not listed. Names are checked: UsageError for a bad one. Every
method may raise StoreError; those that write may raise StoreFull. Methods may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias

from gpucr_hpc.model import CheckpointId, JobId

#: Name of the file that makes a directory a checkpoint.
MANIFEST_NAME = "manifest"
#: A larger record is refused: records are a job's state, not its data.
MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True)
class Orphan:
    """Something that never became a checkpoint, or is no longer one. age_s: since its last change."""

    job: JobId
    name: str
    age_s: float


#: Checkpoints with their jobs, and orphans; in Store, `list` is a method and no longer a type.
Listing: TypeAlias = list[tuple[JobId, CheckpointId]]
Orphans: TypeAlias = list[Orphan]


class Staging(Protocol):
    """A checkpoint that is being written, by one or several processes."""

    @property
    def job(self) -> JobId:
        """The job."""

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint to be."""

    def create(self, name: str) -> BinaryIO:
        """A new file, unbuffered and writable. Refuses a name that is there (StoreError)."""

    def open(self, name: str) -> BinaryIO:
        """A file of this staging, readable, to check what was written. Raises ObjectMissing."""

    def link(self, checkpoint: CheckpointId, name: str, new_name: str) -> None:
        """Have a file of a complete checkpoint of this job here too, under `new_name`, without a copy. It stays when
        that checkpoint is deleted. Raises ObjectMissing, StoreError (also where the file system knows no links)."""

    def remove(self, name: str) -> None:
        """Take a file back. Raises ObjectMissing."""

    def publish(self, manifest: bytes) -> None:
        """Make the checkpoint exist. After this returns it survives a crash; before, it does not exist.

        The files' own data was synced by who wrote it (ImageWriter.finish). Fails when the checkpoint is
        there already; the staging can then still be aborted.
        """

    def abort(self) -> None:
        """Remove everything, after a failure or from any other state; harmless after publish and twice."""


class Store(Protocol):
    """Checkpoints by job and id, and small records by job."""

    @property
    def location(self) -> str:
        """Where it is, for messages."""

    def begin(self, job: JobId, checkpoint: CheckpointId) -> Staging:
        """Start a checkpoint. Raises StoreError when it or its staging is there."""

    def attach(self, job: JobId, checkpoint: CheckpointId) -> Staging:
        """The staging that another process began. Raises CheckpointMissing."""

    def list(self, job: JobId | None = None) -> Listing:
        """Complete checkpoints, of one job or all, oldest first (by id). Unknown jobs have none."""

    def open(self, job: JobId, checkpoint: CheckpointId, name: str) -> BinaryIO:
        """A file of a checkpoint, readable; fileno, if it has one, works with pread. Raises ObjectMissing."""

    def read_manifest(self, job: JobId, checkpoint: CheckpointId) -> bytes:
        """The manifest's bytes, not checked. Raises CheckpointMissing."""

    def replace_manifest(self, job: JobId, checkpoint: CheckpointId, old: bytes, new: bytes) -> None:
        """Put `new` in the place of `old`; after a crash it is one of the two.

        Raises CheckpointMissing, StoreError when the manifest is no longer `old`.
        """

    def delete(self, job: JobId, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint: first it is no longer listed, then its bytes go. Raises CheckpointMissing."""

    def orphans(self, older_than_s: float, job: JobId | None = None) -> Orphans:
        """What dead writers and deleters of a job, or of all, left, unchanged for so long (by this host's clock
        against the store's). older_than_s must be longer than any pause of a living writer."""

    def remove_orphan(self, orphan: Orphan) -> None:
        """Remove one of `orphans`; when it is gone already, that is fine."""

    def put_record(self, job: JobId, name: str, data: bytes) -> None:
        """Keep a small record of a job, replacing an older one: after a crash it is the old or the new."""

    def add_record(self, job: JobId, name: str, data: bytes) -> bool:
        """Keep a record unless there is one of that name: whether it was kept. Of several that try at once, one is."""

    def get_record(self, job: JobId, name: str) -> bytes | None:
        """The record, or None."""

    def delete_record(self, job: JobId, name: str) -> None:
        """Remove a record; when there is none, that is fine."""

    def free_bytes(self) -> int:
        """Bytes that can still be written: space of the file system, and quotas where the kernel can be asked."""
