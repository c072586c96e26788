"""A store in a directory of a (parallel) file system.

    <root>/<job>/<checkpoint>/           a checkpoint: manifest, r0000-p00.pack, r0000.index, ...
    <root>/<job>/<checkpoint>.partial/   being written
    <root>/<job>/<checkpoint>.trash-XX/  being deleted
    <root>/<job>/record-<name>           a record of the job

Works as any user and changes no owner: parallel file systems squash root, so the process runs as the account
that owns the root. Each step goes through the descriptor of the directory above (store.files), so that a directory
exchanged meanwhile leads nowhere. One rename publishes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from gpucr_hpc.errors import CheckpointMissing, ObjectMissing, StoreError, UsageError, store_error
from gpucr_hpc.model import (
    CheckpointId,
    JobId,
    check_checkpoint_id,
    check_job_id,
    check_object_name,
    is_checkpoint_id,
)
from gpucr_hpc.store.base import MANIFEST_NAME, MAX_RECORD_BYTES, Listing, Orphan, Orphans
from gpucr_hpc.store.files import (
    NEW_FILE,
    TEMPORARY,
    StoreFile,
    add_file,
    errors_at,
    exists,
    last_change,
    open_directory,
    open_file,
    read_all,
    remove_tree,
    replace_file,
)
from gpucr_hpc.store.quota import left_bytes

T = TypeVar("T")

_PARTIAL = ".partial"
_TRASH = ".trash-"
_RECORD = "record-"
_TRIES = 5
_MAX_MANIFEST_BYTES = 64 << 20


class PosixStore:
    """A store below `root`; create: make the directory (0700) when it is missing."""

    def __init__(self, root: str | Path, *, create: bool = True) -> None:
        self._root = Path(root)
        if create:
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise store_error(self._root, error) from None

    @property
    def location(self) -> str:
        """The root directory."""
        return str(self._root)

    # --- writing ----------------------------------------------------------------------------------------

    def begin(self, job: JobId, checkpoint: CheckpointId) -> PosixStaging:
        """See Store.begin."""
        check_job_id(job)
        check_checkpoint_id(checkpoint)
        path = self._path(job, checkpoint)

        def make(fd: int) -> None:
            if exists(checkpoint, fd):
                raise StoreError(path=path, reason="this checkpoint is there already")
            os.mkdir(checkpoint + _PARTIAL, 0o700, dir_fd=fd)

        self._in_new_job(job, path, make)
        return PosixStaging(self, job, checkpoint)

    def attach(self, job: JobId, checkpoint: CheckpointId) -> PosixStaging:
        """See Store.attach."""
        check_job_id(job)
        check_checkpoint_id(checkpoint)
        try:
            with self._job(job) as fd, open_directory(checkpoint + _PARTIAL, fd, self._path(job, checkpoint)):
                return PosixStaging(self, job, checkpoint)
        except ObjectMissing:
            raise CheckpointMissing(checkpoint=checkpoint, path=self._path(job)) from None

    def delete(self, job: JobId, checkpoint: CheckpointId) -> None:
        """See Store.delete."""
        check_job_id(job)
        check_checkpoint_id(checkpoint)
        path = self._path(job, checkpoint)
        try:
            with self._job(job) as fd, errors_at(path):
                _throw_away(checkpoint, fd)
        except ObjectMissing:
            raise CheckpointMissing(checkpoint=checkpoint, path=self._path(job)) from None
        self._remove_empty(job)

    # --- reading ----------------------------------------------------------------------------------------

    def list(self, job: JobId | None = None) -> Listing:
        """See Store.list."""
        found: Listing = []
        for each in self._jobs() if job is None else (check_job_id(job),):
            # Where all jobs are looked at, a directory that is not ours must not keep others from their checkpoints.
            passed = (ObjectMissing,) if job is not None else (ObjectMissing, StoreError)
            with contextlib.suppress(*passed), self._job(each) as fd, errors_at(self._path(each)):
                names = filter(is_checkpoint_id, os.listdir(fd))
                found += [(each, name) for name in names if exists(f"{name}/{MANIFEST_NAME}", fd)]
        return sorted(found, key=lambda pair: (pair[1], int(pair[0])))

    def open(self, job: JobId, checkpoint: CheckpointId, name: str) -> BinaryIO:
        """See Store.open."""
        check_job_id(job)
        check_checkpoint_id(checkpoint)
        check_object_name(name)
        path = self._path(job, checkpoint)
        with self._job(job) as fd, open_directory(checkpoint, fd, path) as directory:
            return open_file(name, directory, f"{path}/{name}")

    def read_manifest(self, job: JobId, checkpoint: CheckpointId) -> bytes:
        """See Store.read_manifest."""
        try:
            with self.open(job, checkpoint, MANIFEST_NAME) as file:
                return read_all(file, _MAX_MANIFEST_BYTES, self._path(job, checkpoint, MANIFEST_NAME))
        except ObjectMissing:
            raise CheckpointMissing(checkpoint=checkpoint, path=self._path(job)) from None

    def replace_manifest(self, job: JobId, checkpoint: CheckpointId, old: bytes, new: bytes) -> None:
        """See Store.replace_manifest."""
        path = self._path(job, checkpoint, MANIFEST_NAME)
        if self.read_manifest(job, checkpoint) != old:
            raise StoreError(path=path, reason="was changed by somebody else meanwhile")
        place = self._path(job, checkpoint)
        with self._job(job) as fd, open_directory(checkpoint, fd, place) as directory, errors_at(path):
            replace_file(MANIFEST_NAME, new, directory, path)

    def free_bytes(self) -> int:
        """See Store.free_bytes."""
        with errors_at(self.location):
            status = os.statvfs(self._root)
        free, quota = status.f_bavail * status.f_frsize, left_bytes(str(self._root))
        return free if quota is None else min(free, quota)

    # --- orphans ----------------------------------------------------------------------------------------

    def orphans(self, older_than_s: float, job: JobId | None = None) -> Orphans:
        """See Store.orphans."""
        now, found = time.time(), []
        for each in self._jobs() if job is None else (check_job_id(job),):
            with contextlib.suppress(ObjectMissing, StoreError), self._job(each) as fd, errors_at(self._path(each)):
                for name in sorted(os.listdir(fd)):
                    if _is_orphan_name(name):
                        with contextlib.suppress(FileNotFoundError):
                            age_s = now - last_change(name, fd)
                            if age_s >= older_than_s:
                                found.append(Orphan(each, name, age_s))
        return found

    def remove_orphan(self, orphan: Orphan) -> None:
        """See Store.remove_orphan."""
        check_job_id(orphan.job)
        if not _is_orphan_name(orphan.name):
            raise UsageError(reason=f"{orphan.name!r} is not an orphan's name")
        with contextlib.suppress(ObjectMissing):
            with self._job(orphan.job) as fd, errors_at(self._path(orphan.job, orphan.name)):
                if orphan.name.endswith(_PARTIAL):
                    _throw_away(orphan.name, fd)
                else:
                    remove_tree(orphan.name, fd)
            self._remove_empty(orphan.job)

    # --- records ----------------------------------------------------------------------------------------

    def put_record(self, job: JobId, name: str, data: bytes) -> None:
        """See Store.put_record."""
        self._write_record(job, name, data, replace_file)

    def add_record(self, job: JobId, name: str, data: bytes) -> bool:
        """See Store.add_record. Without hard links it is there a moment before its content is."""
        return self._write_record(job, name, data, add_file)

    def _write_record(self, job: JobId, name: str, data: bytes, write: Callable[[str, bytes, int, str], T]) -> T:
        check_job_id(job)
        final = _RECORD + check_object_name(name)
        if len(data) > MAX_RECORD_BYTES:
            raise UsageError(reason=f"record {name!r} has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
        path = self._path(job, final)
        return self._in_new_job(job, path, lambda fd: write(final, data, fd, path))

    def get_record(self, job: JobId, name: str) -> bytes | None:
        """See Store.get_record."""
        check_job_id(job)
        final = _RECORD + check_object_name(name)
        path = self._path(job, final)
        try:
            with self._job(job) as fd, open_file(final, fd, path) as file:
                return read_all(file, MAX_RECORD_BYTES, path)
        except ObjectMissing:
            return None

    def delete_record(self, job: JobId, name: str) -> None:
        """See Store.delete_record."""
        check_job_id(job)
        final = _RECORD + check_object_name(name)
        with contextlib.suppress(ObjectMissing):
            with self._job(job) as fd, errors_at(self._path(job, final)):
                os.unlink(final, dir_fd=fd)
                os.fsync(fd)
            self._remove_empty(job)

    # --- directories ------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return "/".join((str(self._root), *parts))

    def _jobs(self) -> Iterable[JobId]:
        with errors_at(self.location):
            names = os.listdir(self._root)
        return sorted((name for name in names if name.isascii() and name.isdigit()), key=int)

    @contextmanager
    def _job(self, job: JobId, *, create: bool = False) -> Iterator[int]:
        """Descriptor of a job's directory. Raises ObjectMissing when it is not there and not to be made."""
        with errors_at(self.location):
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if create:
                with errors_at(self._path(job)), contextlib.suppress(FileExistsError):
                    os.mkdir(job, 0o700, dir_fd=root)
                    os.fsync(root)
            with open_directory(job, root, self._path(job)) as fd:
                yield fd
        finally:
            os.close(root)

    def _in_new_job(self, job: JobId, path: str, work: Callable[[int], T]) -> T:
        """Do `work` in a job's directory, made if need be, even while another process removes it as empty."""
        for left in reversed(range(_TRIES)):
            try:
                with self._job(job, create=True) as fd, errors_at(path):
                    return work(fd)
            except ObjectMissing:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _remove_empty(self, job: JobId) -> None:
        """Remove the directory of a job that has nothing left."""
        with contextlib.suppress(OSError):
            os.rmdir(self._path(job))


class PosixStaging:
    """A directory <checkpoint>.partial; see Staging."""

    def __init__(self, store: PosixStore, job: JobId, checkpoint: CheckpointId) -> None:
        self._store, self.job, self.checkpoint = store, job, checkpoint
        self._name = checkpoint + _PARTIAL
        self._path = store._path(job, self._name)

    def create(self, name: str) -> BinaryIO:
        """See Staging.create."""
        check_object_name(name)
        path = f"{self._path}/{name}"
        with self._here() as (_, fd), errors_at(path):
            return StoreFile(os.open(name, NEW_FILE, 0o600, dir_fd=fd), "w", path)

    def open(self, name: str) -> BinaryIO:
        """See Staging.open."""
        check_object_name(name)
        with self._here() as (_, fd):
            return open_file(name, fd, f"{self._path}/{name}")

    def link(self, checkpoint: CheckpointId, name: str, new_name: str) -> None:
        """See Staging.link."""
        check_checkpoint_id(checkpoint)
        check_object_name(name)
        check_object_name(new_name)
        path = self._store._path(self.job, checkpoint)
        with self._here() as (job, fd), open_directory(checkpoint, job, path) as source, errors_at(f"{path}/{name}"):
            os.link(name, new_name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """See Staging.remove."""
        check_object_name(name)
        with self._here() as (_, fd), errors_at(f"{self._path}/{name}"):
            os.unlink(name, dir_fd=fd)

    def publish(self, manifest: bytes) -> None:
        """See Staging.publish."""
        with self._here() as (job, fd), errors_at(self._path):
            if exists(self.checkpoint, job):
                raise StoreError(path=self._path, reason="this checkpoint is there already")
            replace_file(MANIFEST_NAME, manifest, fd, f"{self._path}/{MANIFEST_NAME}")
            # rename would replace an empty directory; one with a manifest is refused (ENOTEMPTY).
            os.rename(self._name, self.checkpoint, src_dir_fd=job, dst_dir_fd=job)
            os.fsync(job)

    def abort(self) -> None:
        """See Staging.abort."""
        with contextlib.suppress(ObjectMissing):
            with self._store._job(self.job) as fd, errors_at(self._path):
                _throw_away(self._name, fd)
            self._store._remove_empty(self.job)

    @contextmanager
    def _here(self) -> Iterator[tuple[int, int]]:
        with self._store._job(self.job) as job, open_directory(self._name, job, self._path) as fd:
            yield job, fd


def _throw_away(name: str, fd: int) -> None:
    """Remove a checkpoint's directory, whatever others do with it meanwhile: who publishes it was first, and it is not
    here under this name any more (FileNotFoundError), or finds none. One who still writes into it leaves an orphan."""
    trash = f"{name.partition('.')[0]}{_TRASH}{secrets.token_hex(4)}"
    os.rename(name, trash, src_dir_fd=fd, dst_dir_fd=fd)
    os.fsync(fd)
    try:
        remove_tree(trash, fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _is_orphan_name(name: str) -> bool:
    stem, dot, suffix = name.partition(".")
    if is_checkpoint_id(stem):
        return dot + suffix == _PARTIAL or (dot + suffix).startswith(_TRASH)
    return name.startswith(_RECORD) and TEMPORARY in name
