"""A step that begins while its job stands still or is being restored: its supervisors are there, its tasks are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import noderestore, participant, tasks
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.noderestore import NodeRestore
from gpucr_hpc.agent.participant import LocalParticipant
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.shepherd import Task


class Told:
    """A supervisor, which remembers what it was told."""

    def __init__(self, key: str, pid: int = 0) -> None:
        self.key, self.pid, self.said = key, pid, list[str]()
        self.hello = SimpleNamespace(get=lambda _: key.partition(".")[0], int=lambda _: 0)

    async def start(self, *_: object, **__: object) -> None:
        self.said.append("START")

    async def attach(self, *_: object, restored: bool) -> None:
        self.said.append(f"ATTACH {restored}")

    async def print(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProtectedJob:
    """With the batch script and the task of a step, and the supervisor of another step."""
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    made = ProtectedJob(SimpleNamespace(config=config, node="n1"), "7")  # type: ignore[arg-type]
    made.capsule = SimpleNamespace(alive=lambda: True, init_pid=1)  # type: ignore[assignment]
    made.tasks = {"batch", "old.0"}
    made.supervisors = {key: Told(key) for key in ("batch", "old.0", "new.0")}  # type: ignore[misc]

    async def nothing(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(made, "save", lambda: None)
    monkeypatch.setattr(made.steps, "connect", nothing)
    monkeypatch.setattr(tasks, "environment_of", lambda pid: {} if pid == 0 else Path(f"/proc/{pid}").stat())
    for module in (noderestore.network, participant.network):
        monkeypatch.setattr(module, "lock", nothing)
        monkeypatch.setattr(module, "unlock", nothing)
    return made


def said(job: ProtectedJob) -> dict[str, list[str]]:
    return {key: supervisor.said for key, supervisor in job.supervisors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("detached", "others"), [(True, ["ATTACH False"]), (False, [])])
def test_a_checkpoint_after_which_the_job_goes_on(job: ProtectedJob, detached: bool, others: list[str]) -> None:
    asyncio.run(job.go_on(detached=detached, message=""))
    assert {"batch": others, "old.0": others, "new.0": ["START"]} == said(job)
    assert "new.0" in job.tasks


def test_a_restore(job: ProtectedJob) -> None:
    restore = NodeRestore.__new__(NodeRestore)
    restore._job, restore._over, restore._meta, restore._worker, restore.report = job, False, {}, None, []

    async def nothing() -> None:
        pass

    async def seen() -> list[str]:
        return []

    restore._gpus = SimpleNamespace(go=nothing, probe=seen, close=nothing)  # type: ignore[assignment]
    asyncio.run(restore.open(""))
    assert {"batch": ["ATTACH True"], "old.0": ["ATTACH True"], "new.0": ["START"]} == said(job)


def test_one_that_has_just_ended_keeps_nobody_from_going_on(job: ProtectedJob) -> None:
    job.supervisors = {key: Told(key, pid) for key, pid in (("new.0", -1), ("new.1", 0))}  # type: ignore[misc]
    asyncio.run(job.go_on(detached=True, message=""))
    assert {"new.0": [], "new.1": ["START"]} == said(job)


def test_a_task_of_which_the_shepherd_has_not_heard(job: ProtectedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """START was said, and the cut came before the supervisor had handed its task over."""
    job.tasks.add("new.0")

    async def detach(*_: object) -> list[Task]:
        return [Task("batch", 5, "none", None), Task("old.0", 6, "none", None)]

    async def run() -> None:
        part: Any = LocalParticipant.__new__(LocalParticipant)
        part._job, part.own_s, part.leave_running = job, {}, True
        await part.lock()
        await job.go_on(detached=part.detached, message="")

    monkeypatch.setattr(participant.shepherd, "detach", detach)
    monkeypatch.setattr(participant, "output_files", lambda _: [])
    job.phase = Phase.CHECKPOINTING
    asyncio.run(run())
    assert {"batch": ["ATTACH False"], "old.0": ["ATTACH False"], "new.0": ["START"]} == said(job)
