"""What one run of a job left, and the words of its lead, do not touch another run on the same node."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import job as job_module
from gpucr_hpc.agent import supervision
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.member import MemberSession
from gpucr_hpc.agent.noderestore import NodeRestore
from gpucr_hpc.agent.peers import Peer
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.restarting import RemoteRestore
from gpucr_hpc.agent.steps import Step, Steps
from gpucr_hpc.errors import GpucrError, PeerLost, RunOver

# Requests of an operation that the same connection has begun: by then the run has been looked at.
CONTINUING = {
    *("join", "gpu_lock", "gpu_unlock", "lock", "capture", "resume", "seal", "commit", "finish", "undo"),
    *("restore_run", "restore_open"),
    *("nccl", "nccl_verify", "nccl_end"),
}


class Capsule:
    init_pid = 1

    def __init__(self, lives: bool = True) -> None:
        self.lives = lives

    def alive(self) -> bool:
        return self.lives


class Connector:
    def forget(self, _job: str) -> None:
        pass


def job_of(tmp_path: Path, *, run: int, capsule: Capsule | None = None, node_rank: int = 1) -> ProtectedJob:
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    context = SimpleNamespace(config=config, node="n2", connector=Connector(), criu=object())
    job = ProtectedJob(context, "7")  # type: ignore[arg-type]
    job.run, job.node_rank, job.phase = run, node_rank, Phase.RUNNING
    job.capsule = capsule  # type: ignore[assignment]
    return job


def batch(restart: int) -> Any:
    numbers = {"RESTART": restart}
    hello = SimpleNamespace(get=lambda _key, default="": default, int=lambda key: numbers.get(key, 0))
    return SimpleNamespace(key="batch", pid=0, hello=hello, lives=lambda: True)


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Capsules that were ended."""
    seen: list[object] = []

    async def discard(_job: str, _run_dir: object, capsule: object) -> None:
        seen.append(capsule)

    monkeypatch.setattr(job_module, "discard", discard)
    monkeypatch.setattr(supervision, "start_time", lambda _pid: 1)
    return seen


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was of a job on its node each time that one began."""
    seen: list[object] = []

    async def begin(job: ProtectedJob, _supervisor: object) -> None:
        seen.append(job.capsule)

    monkeypatch.setattr(supervision.lead, "begin", begin)
    return seen


@pytest.mark.parametrize("lives", [True, False])
def test_a_new_run_begins_without_the_capsule_of_the_last(
    tmp_path: Path, discarded: list[object], begun: list[object], lives: bool
) -> None:
    """The node was another's member: its script would be started once more in what is there."""
    old = Capsule(lives)
    job = job_of(tmp_path, run=1, capsule=old)
    sruns = job.steps
    asyncio.run(supervision.hello(job, batch(restart=2)))
    assert (discarded, begun) == ([old], [None])
    assert job.steps is not sruns


@pytest.mark.parametrize("phase", [Phase.CHECKPOINTING, Phase.REQUEUEING, Phase.LEAVING])
def test_a_new_run_waits_for_the_end_of_a_checkpoint(
    tmp_path: Path, discarded: list[object], begun: list[object], phase: Phase
) -> None:
    """To be sent away with the run that leaves would end the job."""

    async def run() -> None:
        job = job_of(tmp_path, run=0, capsule=Capsule())
        job.phase = phase
        hello = asyncio.ensure_future(supervision.hello(job, batch(restart=1)))
        await asyncio.sleep(0)
        assert (discarded, begun) == ([], [])
        job.phase = Phase.RUNNING if phase is Phase.CHECKPOINTING else Phase.NEW
        await asyncio.wait_for(hello, 10)
        assert begun == [None]

    asyncio.run(run())


def test_the_same_run_keeps_its_capsule(tmp_path: Path, discarded: list[object], monkeypatch: Any) -> None:
    """A supervisor that has lost its agent for a moment."""
    attached: list[object] = []

    async def admit(_job: object, supervisor: object) -> None:
        attached.append(supervisor)

    job = job_of(tmp_path, run=2, capsule=Capsule(), node_rank=0)
    monkeypatch.setattr(supervision, "_admit", admit)
    monkeypatch.setattr(job, "save", lambda: None)
    again = batch(restart=2)
    asyncio.run(supervision.hello(job, again))
    assert (discarded, attached) == ([], [again])


def test_every_request_that_begins_something_names_its_run() -> None:
    for name, method in inspect.getmembers(MemberSession, inspect.isfunction):
        verb = name.removeprefix("do_")
        if name.startswith("do_") and verb not in CONTINUING:
            assert {"run", "fields"} & set(inspect.signature(method).parameters), verb


LATE = {
    "step": {"key": "k", "stdio": "", "token": "", "launch": ""},
    "step_end": {"key": "k"},
    "prepare": {"checkpoint": "c", "data_key": "", "leave_running": False},
    "nccl_begin": {},
    "build": {"nodes": ["n1", "n2"]},
    "restore_build": {"node_rank": 1, "manifest": "", "of": "7", "ran_on": False},
}


@pytest.mark.parametrize("verb", LATE)
def test_the_lead_of_an_earlier_run_has_no_say(tmp_path: Path, discarded: list[object], verb: str) -> None:
    """It may not know yet that Slurm has started the job anew, here with this node's agent as the lead."""
    job = job_of(tmp_path, run=2, capsule=Capsule(), node_rank=0)
    session = MemberSession(job.context, {"7": job})
    with pytest.raises(RunOver):
        asyncio.run(session.request(verb, {"job": "7", "run": 1} | LATE[verb]))
    assert (job.phase, discarded) == (Phase.RUNNING, [])


@pytest.mark.parametrize(("told", "gone"), [(1, False), (2, True), (3, True)])
def test_the_end_is_that_of_one_run(tmp_path: Path, discarded: list[object], told: int, gone: bool) -> None:
    job = job_of(tmp_path, run=2, capsule=Capsule())
    asyncio.run(MemberSession(job.context, {"7": job}).do_discard("7", told))
    assert bool(discarded) == gone == (job.capsule is None)


def test_a_job_that_is_being_made_is_not_idle(tmp_path: Path) -> None:
    """The end of any supervisor's connection removes the jobs that are."""

    async def run() -> None:
        job = job_of(tmp_path, run=1)
        assert job.idle
        job.restore = SimpleNamespace()  # type: ignore[assignment]
        assert not job.idle
        job.restore = None
        async with job.turn:
            assert not job.idle
        assert job.idle

    asyncio.run(run())


@pytest.mark.parametrize("lives", [True, False])
def test_the_last_supervisor_takes_a_dead_capsule_along(
    tmp_path: Path, discarded: list[object], monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """The batch supervisor's end came in the middle of a checkpoint, whose undo found the step's still there."""

    async def lost(_job: object, _supervisor: object) -> None:
        pass

    async def run() -> None:
        job = job_of(tmp_path, run=0, capsule=Capsule(lives), node_rank=0)
        monkeypatch.setattr(supervision, "_task_lost", lost)
        step = SimpleNamespace(key="s.0")
        job.supervisors = {"s.0": step}  # type: ignore[dict-item]
        await supervision.gone(job, step)  # type: ignore[arg-type]
        await asyncio.gather(*job._tasks)

    asyncio.run(run())
    assert bool(discarded) != lives


@pytest.mark.parametrize("replaced", ["steps", "start"])
def test_the_end_of_an_earlier_runs_srun_is_told_to_no_later_shepherd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """It ended while there was no shepherd to tell; then the job is restored on this node, with the same step."""
    told: list[wire.Frame] = []

    async def send(frame: wire.Frame) -> None:
        told.append(frame)

    async def run() -> None:
        job = job_of(tmp_path, run=0, capsule=Capsule(), node_rank=0)
        monkeypatch.setattr(job, "save", lambda: None)
        job.run_dir.steps.mkdir(parents=True)
        where: dict[str, Any] = {"port": 1, "token": "t", "argv": [], "env": {}, "cwd": "/", "umask": 0}
        old = Step("0123456789abcdef", **where, launch="old")
        sruns = job.steps
        sruns.steps[old.key] = old
        ending = asyncio.ensure_future(sruns._end(old, 256))
        await asyncio.sleep(0)
        if replaced == "steps":
            job.steps = Steps(job)
        else:
            sruns.steps[old.key] = Step(old.key, **where, launch="new")
        sruns._control = SimpleNamespace(send=send)  # type: ignore[assignment]
        await asyncio.wait_for(ending, 10)
        job.phase = Phase.NEW

    asyncio.run(run())
    assert told == []


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_a_part_that_was_opened_is_ended_when_the_restore_fails(opened: bool, answers: bool) -> None:
    """Its node takes the restore for done: the end of the connection undoes nothing."""
    said: list[str] = []

    class Other(Peer):
        def __init__(self) -> None:
            self._job, self._node = "7", "n2"

        async def call(self, verb: str, **fields: Any) -> None:
            said.append(f"{verb} {fields['job']} {fields.get('run', '')}".strip())
            if verb == "discard" and not answers:
                raise PeerLost(job="7", node="n2", reason="gone")

        def close(self) -> None:
            said.append("closed")

    async def run() -> None:
        peer = Other()
        part = RemoteRestore(SimpleNamespace(job="7", run=3), 1, peer, "7", b"", ran_on=False)  # type: ignore[arg-type]
        if opened:
            await part.open("")
        await part.undo()

    asyncio.run(run())
    assert said == (["restore_open 7", "discard 7 3", "closed"] if opened else ["closed"])


def test_a_restore_that_was_given_up_opens_nothing(tmp_path: Path) -> None:
    """Another attempt's capsule is there by now, its network locked."""
    job = job_of(tmp_path, run=2, capsule=Capsule())
    restore = NodeRestore.__new__(NodeRestore)
    restore._job, restore._over = job, True
    with pytest.raises(GpucrError):
        asyncio.run(restore.open(""))
