"""What an agent does at its start with jobs that run, and with another agent."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import checkpointing, daemon, journal
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.engine.dump import remove_link_remaps
from gpucr_hpc.errors import CapsuleError, HostError

_HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def job_of(tmp_path: Path) -> ProtectedJob:
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    job = ProtectedJob(SimpleNamespace(config=config, node="n1"), "7")  # type: ignore[arg-type]
    job.run_dir.path.mkdir(parents=True)
    return job


def test_a_second_agent_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take over the jobs of the first; one that is just ending is waited for."""
    monkeypatch.setattr(daemon, "_ALONE_LIMIT_S", 0.2)
    argv = [sys.executable, "-c", _HOLD, str(tmp_path / "agent.lock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(HostError, match="another agent is at work"):
            asyncio.run(daemon._alone(tmp_path))
        first.kill()
    os.close(asyncio.run(daemon._alone(tmp_path)))


_FAILURES = [OSError(errno.EIO, "no"), CapsuleError(job="7", node="n", reason="no"), KeyError("x")]


@pytest.mark.parametrize("failure", _FAILURES)
def test_a_job_that_is_not_adopted_keeps_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """It may run; that of a job that nobody knows is removed."""
    removed: list[str] = []

    async def adopt(*_: object) -> bool:
        raise failure

    async def remove(name: str) -> None:
        removed.append(name)

    for job in ("7", "8"):
        run_dir = RunDir.of(str(tmp_path), job)
        run_dir.path.mkdir(parents=True)
        run_dir.save({})
    monkeypatch.setattr(daemon.journal, "adopt", adopt)
    monkeypatch.setattr(daemon.network, "existing", lambda: {"7", "8", "9"})
    monkeypatch.setattr(daemon.network, "remove", remove)
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    asyncio.run(daemon.Agent(SimpleNamespace(config=config, node="n1")).adopt())  # type: ignore[arg-type]
    assert removed == ["9"]


def test_what_cannot_be_cleaned_up_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the job is not ended for it."""
    tries, opened = [1, 2], list[str]()
    monkeypatch.setattr(journal, "_SETTLE_AGAIN_S", 0.0)

    async def settle(*_: object) -> None:
        if tries:
            tries.pop()
            raise CapsuleError(job="7", node="n", reason="an earlier CRIU does not end")

    async def unlock(name: str) -> None:
        opened.append(name)

    monkeypatch.setattr(checkpointing, "settle", settle)
    monkeypatch.setattr(journal.network, "unlock", unlock)
    job = job_of(tmp_path)
    job.context.config.cuda = None  # type: ignore[misc,assignment]
    capsule: Any = SimpleNamespace(alive=lambda: True)
    job.capsule, job.phase = capsule, Phase.RUNNING

    async def run() -> None:
        await journal._settle(job, capsule)
        while job._tasks:
            await asyncio.wait(job._tasks)

    asyncio.run(run())
    assert (tries, opened) == ([], ["7", "7"])


def test_a_full_disk_does_not_stop_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is for an agent that comes later."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    job = job_of(tmp_path)
    monkeypatch.setattr(RunDir, "save", full)
    monkeypatch.setattr(daemon.journal, "state_of", lambda _: {})
    job.set_phase(Phase.RUNNING)
    assert job.phase is Phase.RUNNING


def test_stand_ins_are_found_while_a_program_removes_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path / "a/b", tmp_path / "c"):
        place.mkdir(parents=True)
        (place / "link_remap.5").touch()
        (place / "kept").touch()
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/a"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    remove_link_remaps(SimpleNamespace(inside=lambda _: tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / "c/link_remap.5").exists()
    assert (tmp_path / "c/kept").exists()
