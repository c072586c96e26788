"""What the worker does with the store, besides images: manifests, remains, small records, whether it works.

Who calls: worker.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from abc import ABC, abstractmethod
from typing import Any

from gpucr_hpc.errors import CheckpointMissing, GpucrError, StoreError
from gpucr_hpc.model import new_checkpoint_id
from gpucr_hpc.store.posix import PosixStore

_PROBE_BYTES = 8 << 20


class StoreVerbs(ABC):
    """Mixed into Worker, which knows the store; its methods are verbs of the agent's orders."""

    @property
    @abstractmethod
    def store(self) -> PosixStore:
        """The one that was opened."""

    def do_manifests(self, job: str | None = None, checkpoint: str | None = None) -> list[tuple[str, str, str]]:
        """Job, checkpoint and manifest (base64) of every complete checkpoint, or those of a job or an id, oldest
        first."""
        found = []
        for owner, name in self.store.list(job):
            if checkpoint not in (None, name):
                continue
            try:
                data = self.store.read_manifest(owner, name)
            except GpucrError:
                data = b""  # reported by whoever decodes it
            found.append((owner, name, base64.b64encode(data).decode()))
        return found

    def do_replace_manifest(self, job: str, checkpoint: str, old: str, new: str) -> None:
        """Put a manifest (base64) in the place of an older one of the same checkpoint."""
        self.store.replace_manifest(job, checkpoint, base64.b64decode(old), base64.b64decode(new))

    def do_delete(self, job: str, checkpoint: str) -> None:
        self.store.delete(job, checkpoint)

    def do_orphans(self, job: str, older_than_s: float) -> list[str]:
        """Remove unpublished remains of a job's earlier checkpoints."""
        removed = self.store.orphans(older_than_s, job)
        for orphan in removed:
            self.store.remove_orphan(orphan)
        return [orphan.name for orphan in removed]

    def do_sweep(self, older_than_s: float, jobs: list[str] | None, dry_run: bool) -> list[dict[str, Any]]:
        """Remains of these jobs, or of all, and their removal."""
        found = [o for o in self.store.orphans(older_than_s) if jobs is None or o.job in jobs]
        report: list[dict[str, Any]] = []
        for orphan in found:
            report.append({"job": orphan.job, "name": orphan.name, "age_s": orphan.age_s})
            if not dry_run:
                try:
                    self.store.remove_orphan(orphan)
                except GpucrError as error:
                    report[-1]["problem"] = str(error)
        return report

    def do_record(
        self, job: str, name: str, data: str | None = None, delete: bool = False, new: bool = False
    ) -> str | bool | None:
        """Write, delete or read a small durable record of a job. new: write it only where there is none; whether that
        was so."""
        if delete:
            self.store.delete_record(job, name)
        elif data is not None and new:
            return self.store.add_record(job, name, data.encode())
        elif data is not None:
            self.store.put_record(job, name, data.encode())
        else:
            found = self.store.get_record(job, name)
            return None if found is None else found.decode()
        return None

    def do_space(self) -> int:
        """Free bytes of the store's file system."""
        return self.store.free_bytes()

    def do_probe(self) -> dict[str, Any]:
        """Write, sync and read a small file and a larger one in the store. seconds: for the small one; bytes_per_s: the
        speed that the larger one makes probable; owner: uid that the file got; links: whether a checkpoint can hold
        files of an earlier one."""
        start = time.monotonic()
        self.store.put_record("0", "probe", b"probe")
        self.store.get_record("0", "probe")
        seconds = time.monotonic() - start
        owner = os.stat(f"{self.store.location}/0").st_uid
        data = os.urandom(_PROBE_BYTES)
        start = time.monotonic()
        self.store.put_record("0", "probe", data)
        bytes_per_s = _PROBE_BYTES / max(1e-6, time.monotonic() - start)
        self.store.delete_record("0", "probe")
        return {"seconds": seconds, "bytes_per_s": bytes_per_s, "owner": owner, "links": self._has_links()}

    def _has_links(self) -> bool:
        first, second = (new_checkpoint_id(time.time() + ahead) for ahead in range(2))
        staging = self.store.begin("0", first)
        try:
            staging.create("probe").close()
            staging.publish(b"probe")
            staging = self.store.begin("0", second)
            staging.link(first, "probe", "probe")
        except StoreError:
            return False
        finally:
            staging.abort()
            with contextlib.suppress(CheckpointMissing):
                self.store.delete("0", first)
        return True
