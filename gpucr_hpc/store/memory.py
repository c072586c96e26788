"""A store in memory, for tests: the same contract as PosixStore, and a disk that can be made small."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from typing import Any, BinaryIO

from gpucr_hpc.errors import CheckpointMissing, ObjectMissing, StoreError, StoreFull, UsageError
from gpucr_hpc.model import CheckpointId, JobId, check_checkpoint_id, check_job_id, check_object_name
from gpucr_hpc.store.base import MANIFEST_NAME, MAX_RECORD_BYTES, Listing, Orphan, Orphans

_Files = dict[str, bytearray]
_Key = tuple[JobId, CheckpointId]


class _Sink(io.RawIOBase):
    """A new file; it has no descriptor, so callers go through seek and write."""

    def __init__(self, store: MemoryStore, content: bytearray, path: str) -> None:
        super().__init__()
        self._store, self._content, self._path, self._at = store, content, path, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        return self._at

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        with self._store._lock:
            end = self._at + len(left)
            growth = max(0, end - len(self._content))
            if growth > self._store.free_bytes():
                raise StoreFull(path=self._path, reason=os.strerror(errno.ENOSPC))
            self._content.extend(bytes(growth))
            self._content[self._at : end] = left
            self._store._used += growth
            self._at = end
        return len(left)


class MemoryStore:
    """See Store. capacity_bytes: size of the disk."""

    location = "memory"

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._lock = threading.RLock()
        self._capacity, self._used = capacity_bytes, 0
        self._complete: dict[_Key, _Files] = {}
        self._partial: dict[_Key, tuple[float, _Files]] = {}
        self._records: dict[tuple[JobId, str], bytes] = {}

    def begin(self, job: JobId, checkpoint: CheckpointId) -> MemoryStaging:
        """See Store.begin."""
        key = _key(job, checkpoint)
        with self._lock:
            if key in self._complete or key in self._partial:
                raise StoreError(path=_path(key), reason="this checkpoint is there already")
            self._partial[key] = (time.monotonic(), {})
        return MemoryStaging(self, key)

    def attach(self, job: JobId, checkpoint: CheckpointId) -> MemoryStaging:
        """See Store.attach."""
        key = _key(job, checkpoint)
        if key not in self._partial:
            raise CheckpointMissing(checkpoint=checkpoint, path=f"memory/{job}")
        return MemoryStaging(self, key)

    def list(self, job: JobId | None = None) -> Listing:
        """See Store.list."""
        if job is not None:
            check_job_id(job)
        with self._lock:
            found = [key for key in self._complete if job in (None, key[0])]
        return sorted(found, key=lambda pair: (pair[1], int(pair[0])))

    def open(self, job: JobId, checkpoint: CheckpointId, name: str) -> BinaryIO:
        """See Store.open."""
        key = _key(job, checkpoint)
        check_object_name(name)
        with self._lock:
            return _source(self._complete.get(key, {}), key, name)

    def read_manifest(self, job: JobId, checkpoint: CheckpointId) -> bytes:
        """See Store.read_manifest."""
        key = _key(job, checkpoint)
        with self._lock:
            if key not in self._complete:
                raise CheckpointMissing(checkpoint=checkpoint, path=f"memory/{job}")
            return bytes(self._complete[key][MANIFEST_NAME])

    def replace_manifest(self, job: JobId, checkpoint: CheckpointId, old: bytes, new: bytes) -> None:
        """See Store.replace_manifest."""
        with self._lock:
            if self.read_manifest(job, checkpoint) != old:
                raise StoreError(path=_path(_key(job, checkpoint)), reason="was changed by somebody else meanwhile")
            self._complete[_key(job, checkpoint)][MANIFEST_NAME] = bytearray(new)
            self._used += len(new) - len(old)

    def delete(self, job: JobId, checkpoint: CheckpointId) -> None:
        """See Store.delete."""
        with self._lock:
            files = self._complete.pop(_key(job, checkpoint), None)
            if files is None:
                raise CheckpointMissing(checkpoint=checkpoint, path=f"memory/{job}")
            self._release(files)

    def orphans(self, older_than_s: float, job: JobId | None = None) -> Orphans:
        """See Store.orphans."""
        now = time.monotonic()
        with self._lock:
            ages = [(key, now - begun) for key, (begun, _) in sorted(self._partial.items())]
        found = [Orphan(key[0], key[1] + ".partial", age_s) for key, age_s in ages if age_s >= older_than_s]
        return [orphan for orphan in found if job in (None, orphan.job)]

    def remove_orphan(self, orphan: Orphan) -> None:
        """See Store.remove_orphan."""
        if not orphan.name.endswith(".partial"):
            raise UsageError(reason=f"{orphan.name!r} is not an orphan's name")
        MemoryStaging(self, _key(orphan.job, orphan.name.removesuffix(".partial"))).abort()

    def put_record(self, job: JobId, name: str, data: bytes) -> None:
        """See Store.put_record."""
        key = (check_job_id(job), check_object_name(name))
        if len(data) > MAX_RECORD_BYTES:
            raise UsageError(reason=f"record {name!r} has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
        with self._lock:
            growth = len(data) - len(self._records.get(key, b""))
            if growth > self.free_bytes():
                raise StoreFull(path=f"memory/{job}/{name}", reason=os.strerror(errno.ENOSPC))
            self._records[key] = bytes(data)
            self._used += growth

    def add_record(self, job: JobId, name: str, data: bytes) -> bool:
        """See Store.add_record."""
        with self._lock:
            if self.get_record(job, name) is not None:
                return False
            self.put_record(job, name, data)
            return True

    def get_record(self, job: JobId, name: str) -> bytes | None:
        """See Store.get_record."""
        return self._records.get((check_job_id(job), check_object_name(name)))

    def delete_record(self, job: JobId, name: str) -> None:
        """See Store.delete_record."""
        with self._lock:
            self._used -= len(self._records.pop((check_job_id(job), check_object_name(name)), b""))

    def free_bytes(self) -> int:
        """See Store.free_bytes."""
        return self._capacity - self._used

    def _release(self, files: _Files) -> None:
        """Give the space of files that belong to no checkpoint any more back; linked ones stay."""
        others = [*self._complete.values(), *(files for _, files in self._partial.values())]
        held = {id(content) for each in others for content in each.values()}
        self._used -= sum(len(content) for content in files.values() if id(content) not in held)


class MemoryStaging:
    """See Staging."""

    def __init__(self, store: MemoryStore, key: _Key) -> None:
        self._store, self._key = store, key
        self.job, self.checkpoint = key

    def create(self, name: str) -> BinaryIO:
        """See Staging.create."""
        check_object_name(name)
        with self._store._lock:
            files = self._files()
            if name in files:
                raise StoreError(path=f"{_path(self._key)}/{name}", reason=os.strerror(errno.EEXIST))
            files[name] = bytearray()
            return _Sink(self._store, files[name], name)  # type: ignore[return-value]

    def open(self, name: str) -> BinaryIO:
        """See Staging.open."""
        check_object_name(name)
        with self._store._lock:
            return _source(self._files(), self._key, name)

    def link(self, checkpoint: CheckpointId, name: str, new_name: str) -> None:
        """See Staging.link."""
        key = _key(self.job, checkpoint)
        check_object_name(name)
        check_object_name(new_name)
        with self._store._lock:
            files, there = self._files(), self._store._complete.get(key, {})
            if name not in there:
                raise ObjectMissing(path=f"{_path(key)}/{name}")
            if new_name in files:
                raise StoreError(path=f"{_path(self._key)}/{new_name}", reason=os.strerror(errno.EEXIST))
            files[new_name] = there[name]

    def remove(self, name: str) -> None:
        """See Staging.remove."""
        check_object_name(name)
        with self._store._lock:
            files = self._files()
            if name not in files:
                raise ObjectMissing(path=f"{_path(self._key)}/{name}")
            self._store._release({name: files.pop(name)})

    def publish(self, manifest: bytes) -> None:
        """See Staging.publish."""
        with self._store._lock:
            files = self._files()
            if self._key in self._store._complete:
                raise StoreError(path=_path(self._key), reason="this checkpoint is there already")
            if len(manifest) > self._store.free_bytes():
                raise StoreFull(path=_path(self._key), reason=os.strerror(errno.ENOSPC))
            files[MANIFEST_NAME] = bytearray(manifest)
            self._store._used += len(manifest)
            del self._store._partial[self._key]
            self._store._complete[self._key] = files

    def abort(self) -> None:
        """See Staging.abort."""
        with self._store._lock:
            _, files = self._store._partial.pop(self._key, (0.0, {}))
            self._store._release(files)

    def _files(self) -> _Files:
        try:
            return self._store._partial[self._key][1]
        except KeyError:
            raise ObjectMissing(path=_path(self._key)) from None


def _key(job: JobId, checkpoint: CheckpointId) -> _Key:
    return check_job_id(job), check_checkpoint_id(checkpoint)


def _path(key: _Key) -> str:
    return f"memory/{key[0]}/{key[1]}"


def _source(files: _Files, key: _Key, name: str) -> BinaryIO:
    if name not in files:
        raise ObjectMissing(path=f"{_path(key)}/{name}")
    return io.BytesIO(bytes(files[name]))
