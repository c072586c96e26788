"""A restarted job while slurmctld is away, or when Slurm has taken its run away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpucr_hpc.agent import restarting
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.errors import JobUnknown, RequeueFailed, RunOver, SlurmError
from gpucr_hpc.slurm.query import JobInfo, parse_job


def info(states: str = "RUNNING", restarts: int = 2) -> JobInfo:
    text = f'{{"jobs": [{{"job_id": 7, "job_state": {states.split()}, "restart_cnt": {restarts}}}]}}'
    return parse_job("7", text.replace("'", '"'))


class FakeSupervisor:
    """Remembers what it was told; `alive` says how often it is still found."""

    def __init__(self, alive: int = 99) -> None:
        self.alive, self.printed, self.refused = alive, [], []

    def lives(self) -> bool:
        self.alive -= 1
        return self.alive >= 0

    async def print(self, text: str) -> None:
        self.printed.append(text)

    async def refuse(self, message: str, code: int) -> None:
        self.refused.append((message, code))


def answers(monkeypatch: pytest.MonkeyPatch, *all_answers: JobInfo | Exception) -> None:
    """slurmctld says one after the other; the last one stays."""
    monkeypatch.setattr(restarting, "_PAUSE_S", 0.001)
    left: Iterator[JobInfo | Exception] = iter(all_answers)
    last = all_answers[-1]

    async def job(_job: str) -> JobInfo:
        answer = next(left, last)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(restarting.slurm, "job", job)


def protected(run: int = 2) -> ProtectedJob:
    config = SimpleNamespace(agent=SimpleNamespace(on_restore_failure="hold"))
    return cast(ProtectedJob, SimpleNamespace(job="7", run=run, context=SimpleNamespace(config=config)))


def ask(supervisor: FakeSupervisor) -> Any:
    return asyncio.run(restarting.ask(protected(), cast(Supervisor, supervisor)))


def test_slurmctld_is_asked_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job waits, and its output says so once."""
    down = SlurmError(reason="Unable to contact slurm controller")
    answers(monkeypatch, down, down, down, info())
    supervisor = FakeSupervisor()
    assert ask(supervisor) == info()
    assert supervisor.printed == ["slurmctld does not answer; the job waits for it"]


@pytest.mark.parametrize(
    ("answer", "alive"), [(JobUnknown(job="7"), 99), (SlurmError(reason="down"), 3)], ids=["unknown", "nobody waits"]
)
def test_asking_ends(monkeypatch: pytest.MonkeyPatch, answer: Exception, alive: int) -> None:
    """A job that slurmctld does not know, or whose supervisor is gone, is over here."""
    answers(monkeypatch, answer)
    with pytest.raises(RunOver):
        ask(FakeSupervisor(alive))


@pytest.mark.parametrize("now", [info(restarts=3), info("PENDING COMPLETING"), info("CANCELLED")])
def test_a_later_run_is_not_held(monkeypatch: pytest.MonkeyPatch, now: JobInfo) -> None:
    """A hold that comes late would hit a run that is well."""
    answers(monkeypatch, now)

    async def hold(_job: str) -> None:
        raise AssertionError("held")

    monkeypatch.setattr(restarting.slurm, "requeue_hold", hold)
    supervisor = FakeSupervisor()
    asyncio.run(restarting.give_up(protected(), cast(Supervisor, supervisor), "no"))
    assert supervisor.refused == [("", restarting.HELD_EXIT_CODE)]


def test_hold_is_tried_until_slurmctld_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not end with a failure only because slurmctld is away."""
    answers(monkeypatch, info())
    tries = [SlurmError(reason="down"), SlurmError(reason="down")]

    async def hold(_job: str) -> None:
        if tries:
            raise tries.pop()

    monkeypatch.setattr(restarting.slurm, "requeue_hold", hold)
    supervisor = FakeSupervisor()
    asyncio.run(restarting.give_up(protected(), cast(Supervisor, supervisor), "the reason"))
    assert tries == []
    ((message, code),) = supervisor.refused
    assert code == restarting.HELD_EXIT_CODE
    assert message.startswith("not restored: the reason. The job is held")


def test_a_refused_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own no is final."""
    answers(monkeypatch, info())

    async def hold(_job: str) -> None:
        raise RequeueFailed(job="7", reason="Access denied")

    monkeypatch.setattr(restarting.slurm, "requeue_hold", hold)
    supervisor = FakeSupervisor()
    asyncio.run(restarting.give_up(protected(), cast(Supervisor, supervisor), "the reason"))
    assert "could not be held" in supervisor.refused[0][0]
