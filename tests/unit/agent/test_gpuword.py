"""The user is told once, soon after the first use of a GPU, whether the job is protected as it is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import gpuword
from gpucr_hpc.agent.gpuword import Use
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.config import CudaConfig, EngineConfig
from gpucr_hpc.engine.cuda import client
from gpucr_hpc.engine.cuda import processes as procfs

PROGRAM = """
import mmap, sys
library = open("libcuda.so.1", "r+b")
held = mmap.mmap(library.fileno(), 4096)
print("ready", flush=True)
sys.stdin.read()
"""
GOOD, BAD = Use(2, 3 << 30, ""), Use(2, 3 << 30, "python3 (pids 5, 6): is a rank of NCCL")


class Job:
    """What `watch` asks of a ProtectedJob."""

    def __init__(self, init_pid: int = 1, driver: str = "auto") -> None:
        self.job, self.phase, self.gpu_word, self.said, self.saved = "7", Phase.RUNNING, False, list[str](), 0
        self.capsule = SimpleNamespace(init_pid=init_pid, root=1, uid=0, alive=lambda: True)
        self.context = SimpleNamespace(config=SimpleNamespace(cuda=CudaConfig(driver=driver), engine=EngineConfig()))
        self.supervisors = {"batch": self}

    async def print(self, message: str) -> None:
        self.said.append(message)

    def save(self) -> None:
        self.saved += 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpuword, "_POLL_S", (0.0,))
    monkeypatch.setattr(gpuword, "_LOOKS_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv(client.FAKE_VARIABLE, str(tmp_path))


def watched(job: Job, uses: list[Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the looks find these one after the other; how many were taken."""
    left = iter(uses)
    count = 0

    async def look(*_: Any) -> Use | None:
        nonlocal count
        count += 1
        return next(left)

    monkeypatch.setattr(gpuword, "look", look)
    asyncio.run(gpuword.watch(job))  # type: ignore[arg-type]
    return count


def test_good_word_comes_after_the_last_look(monkeypatch):
    job = Job()
    assert watched(job, [None, None, GOOD, GOOD, GOOD, GOOD], monkeypatch) == 6
    assert job.said == [
        "2 processes of this job on this node use GPUs, 3 GiB of GPU memory: it can be checkpointed as it is"
    ]
    assert job.gpu_word
    assert job.saved == 1


def test_problem_that_comes_later_is_said_at_once(monkeypatch):
    """As with ranks that join a communicator some time after their first use of a GPU."""
    job = Job()
    assert watched(job, [GOOD, GOOD, BAD], monkeypatch) == 3
    (said,) = job.said
    assert "NOT protected and cannot be moved: python3 (pids 5, 6): is a rank of NCCL" in said


def test_said_once_in_a_life(monkeypatch):
    job = Job()
    job.gpu_word = True
    assert watched(job, [], monkeypatch) == 0
    assert job.said == []


def test_ended_or_moved_job_is_left_alone(monkeypatch):
    job = Job()
    job.capsule.alive = lambda: False
    assert watched(job, [], monkeypatch) == 0
    assert job.said == []


def test_switched_off(monkeypatch):
    assert watched(Job(driver="off"), [], monkeypatch) == 0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[int]:
    """A GPU process that is the first of a pid namespace."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root here")
    (tmp_path / "libcuda.so.1").write_bytes(b"x" * 4096)
    shell = subprocess.Popen(
        ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c", PROGRAM],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert shell.stdout is not None
    assert shell.stdout.readline() == b"ready\n"
    yield int(Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()[0])
    shell.kill()
    shell.communicate()


@pytest.mark.parametrize("mig", [False, True])
def test_what_a_look_finds(process, tmp_path, mig):
    gpu = {"index": 0, "uuid": "GPU-0", "name": "Fake", "minor": 0, "memory_bytes": 1 << 36, "used_bytes": 0}
    table = {"driver": "580.1", "gpus": [gpu | {"mig": mig}], "used": {str(process): 3 << 30}, "mps": False}
    (tmp_path / "gpus.json").write_text(json.dumps(table))
    job = Job(process)
    use = asyncio.run(gpuword.look(job, job.capsule))  # type: ignore[arg-type]
    assert use is not None
    assert (use.processes, use.bytes) == (1, 3 << 30)
    assert mig == ("MIG" in use.problem)


@pytest.mark.skipif(procfs.driver_loaded(), reason="this machine has the driver")
def test_driver_that_the_agent_cannot_use_is_a_problem(process, monkeypatch):
    """The job would otherwise learn of it at its preemption."""
    monkeypatch.delenv(client.FAKE_VARIABLE)
    job = Job(process, driver="ctypes")
    monkeypatch.setattr(procfs, "driver_loaded", lambda: True)
    use = asyncio.run(gpuword.look(job, job.capsule))  # type: ignore[arg-type]
    assert use is not None
    assert "libcuda.so.1 cannot be loaded" in use.problem


def test_process_without_the_drivers_library_is_no_use_of_a_gpu():
    job = Job(os.getpid())
    job.capsule.init_pid = 1 << 22
    assert asyncio.run(gpuword.look(job, job.capsule)) is None  # type: ignore[arg-type]
