"""Whoever says HELLO for a job that is not his own gets no say in it, whatever he says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import daemon, lead
from gpucr_hpc.agent.daemon import Agent
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.member import MemberSession
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.slurm.query import parse_job


class Connection:
    """A channel on which a HELLO came, and then some frames."""

    def __init__(self, uid: int, *frames: wire.Frame) -> None:
        self.peer = SimpleNamespace(pid=os.getpid(), uid=uid, gid=uid)
        self.left, self.sent = list(frames), list[wire.Frame]()

    async def receive(self) -> wire.Frame | None:
        return self.left.pop(0) if self.left else None

    async def send(self, frame: wire.Frame) -> None:
        self.sent.append(frame)


def hello(**more: Any) -> wire.Frame:
    return wire.make(wire.Type.HELLO, JOB="7", STEP="batch", **more)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    settings = SimpleNamespace(run_dir=str(tmp_path), when_unprotected="run", on_restore_failure="hold")
    config = SimpleNamespace(agent=settings, store=SimpleNamespace(root=str(tmp_path)))
    monkeypatch.setattr(daemon.cgroup, "slurm_job", lambda _: "7")

    async def job(_: str) -> Any:
        return parse_job("7", '{"jobs": [{"job_id": 7, "user_id": 1, "job_state": ["RUNNING"], "restart_cnt": 1}]}')

    async def requeue_hold(_: str) -> None:
        pytest.fail("the owner's job is held")

    monkeypatch.setattr(lead.slurm, "job", job)
    monkeypatch.setattr(lead.slurm, "requeue_hold", requeue_hold)
    return Agent(SimpleNamespace(config=config, node="n1", criu=1, criu_problem=None))  # type: ignore[arg-type]


def test_of_a_process_of_another_job(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's control group says whose a process is."""
    monkeypatch.setattr(daemon.cgroup, "slurm_job", lambda _: "8")
    connection = Connection(2)
    asyncio.run(agent._serve(connection, hello()))  # type: ignore[arg-type]
    (frame,) = connection.sent
    assert frame.type is wire.Type.RUN
    assert "is of job 8, not of job 7" in frame.get("MSG")
    assert agent.jobs == {}


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.parametrize("option", [[], ["restore=20261127T232501Z-3f9a"]])
def test_of_another_user_where_groups_have_no_numbers(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, restart: int, option: list[str]
) -> None:
    """As with SLUIDs: slurmctld says whose the job is. It is neither held nor told of an end."""
    monkeypatch.setattr(daemon.cgroup, "slurm_job", lambda _: "sABCDEF")
    ended: list[object] = []
    monkeypatch.setattr(lead, "ended", lambda *args: ended.append(args))
    connection = Connection(2, wire.make(wire.Type.ENDED, STATUS=0, NOTICE=1))
    said = wire.make(wire.Type.HELLO, ("OPTION", option), JOB="7", STEP="batch", RESTART=restart)
    asyncio.run(agent._serve(connection, said))  # type: ignore[arg-type]
    assert [frame.type for frame in connection.sent] == [wire.Type.REFUSE]
    assert "uid 2" in connection.sent[0].get("MSG")
    assert all("batch" not in job.supervisors for job in agent.jobs.values())


def test_one_that_was_there_before_the_owners_job_came(agent: Agent) -> None:
    """On another node than the job's first."""
    job = agent.jobs["7"] = ProtectedJob(agent.context, "7")
    job.uid, job.supervisors = 2, {"batch": SimpleNamespace(uid=2)}  # type: ignore[dict-item]
    fields = {"uid": 1, "gid": 1, "run": 0, "groups": [], "store_root": "/", "excluded": "", "files": "rollback"}
    fields |= {"names": ["a"], "nodes": ["n1"], "addresses": ["192.0.2.1"], "hide_io_uring": False}
    found = MemberSession(agent.context, agent.jobs)._set_up("7", 0, fields)
    assert found is job
    assert (found.uid, found.supervisors) == (1, {})


def test_a_job_is_not_forgotten_while_a_supervisor_of_it_is_served(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new run's HELLO waits for the remains of the last one, and meanwhile another connection ends."""

    async def said_hello(_: object, supervisor: Any) -> None:
        if supervisor.key == "batch":
            await agent._serve(Connection(1), wire.make(wire.Type.HELLO, JOB="7", STEP="0"))  # type: ignore[arg-type]
            assert "7" in agent.jobs

    async def gone(*_: object) -> None:
        pass

    monkeypatch.setattr(daemon.supervision, "hello", said_hello)
    monkeypatch.setattr(daemon.supervision, "gone", gone)
    asyncio.run(agent._serve(Connection(1), hello()))  # type: ignore[arg-type]
    assert agent.jobs == {}


def test_frames_of_another_user_are_not_heard(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """His connection outlived the change of the job's owner."""
    heard: list[wire.Frame] = []

    async def said_hello(job: ProtectedJob, _: object) -> None:
        job.uid, job.phase = 1, Phase.RUNNING

    async def frame(_: object, __: object, what: wire.Frame) -> None:
        heard.append(what)

    async def gone(*_: object) -> None:
        pass

    for name, function in (("hello", said_hello), ("frame", frame), ("gone", gone)):
        monkeypatch.setattr(daemon.supervision, name, function)
    for uid, expected in ((2, 0), (1, 1)):
        connection = Connection(uid, wire.make(wire.Type.PLACE, PID=1))
        asyncio.run(agent._serve(connection, hello()))  # type: ignore[arg-type]
        assert len(heard) == expected
