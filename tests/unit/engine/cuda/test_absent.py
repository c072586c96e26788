"""A node without NVIDIA's driver pays nothing: no process is looked at, no worker starts."""

from __future__ import annotations

import asyncio
import os

import pytest

from gpucr_hpc.capsule.processes import Process, read_process
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.client import FAKE_VARIABLE, CudaWorker
from gpucr_hpc.engine.cuda.node import NodeGpus


def _refuse(*_args: object, **_fields: object) -> None:
    raise AssertionError("looked at")


async def _steps(gpus: NodeGpus, processes: list[Process]) -> None:
    await gpus.find(processes)
    await gpus.warm()
    await gpus.lock()
    await gpus.checkpoint()
    gpus.verify(processes)
    assert gpus.meta() is None
    await gpus.go()
    await gpus.resume()
    await gpus.close()


def test_nothing_is_looked_at_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAKE_VARIABLE, raising=False)
    monkeypatch.setattr(procfs, "driver_loaded", lambda: False)
    monkeypatch.setattr(procfs, "candidates", _refuse)
    monkeypatch.setattr(procfs, "devices", _refuse)
    monkeypatch.setattr(CudaWorker, "_start", _refuse)
    own = read_process(os.getpid())
    assert own is not None
    gpus = NodeGpus("7", CudaConfig())
    assert gpus.absent
    asyncio.run(_steps(gpus, [own]))


def test_with_a_driver_processes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAKE_VARIABLE, raising=False)
    monkeypatch.setattr(procfs, "driver_loaded", lambda: True)
    assert not NodeGpus("7", CudaConfig()).absent
