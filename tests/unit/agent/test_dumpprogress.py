"""How far a dump is: what the worker has read, and what was read for it."""

from __future__ import annotations

import os

from gpucr_hpc.agent import dumpprogress
from gpucr_hpc.agent.dumpprogress import DumpProgress


def test_what_others_have_read_counts(monkeypatch):
    """gpucr-copier's part is in no count of the kernel's."""
    monkeypatch.setattr(dumpprogress, "read_bytes", lambda _: 1000)
    progress = DumpProgress(os.getpid(), 10_000)
    assert progress.as_dict()["bytes"] == 1000
    progress.beside_bytes = lambda: 5000
    assert progress.as_dict()["bytes"] == 6000
    progress.beside_bytes = lambda: 50_000
    assert progress.as_dict()["bytes"] == 10_000, "no more than there is"


def test_the_kernel_counts_what_a_process_reads(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(100_000))
    before = dumpprogress.read_bytes(os.getpid())
    path.read_bytes()
    assert dumpprogress.read_bytes(os.getpid()) - before >= 100_000
    assert dumpprogress.read_bytes(1 << 30) == 0
