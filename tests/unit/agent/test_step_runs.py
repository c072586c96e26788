"""What one start of a step's real srun leaves is not taken for another's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import steps
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.lead import exit_code
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.steps import Step, StepOnNode, Steps
from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.processes import start_time
from gpucr_hpc.config import NetworkConfig
from gpucr_hpc.errors import PeerLost
from gpucr_hpc.slurm import srun_args

KEY = "0123456789abcdef"


class Shepherd:
    """The agent's end of the connection to it: what it was told."""

    def __init__(self) -> None:
        self.told: list[wire.Frame] = []

    async def send(self, frame: wire.Frame) -> None:
        self.told.append(frame)


@pytest.fixture
def wrapper() -> Iterator[subprocess.Popen[bytes]]:
    """A real srun's wrapper, which runs on."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def job_of(tmp_path: Path) -> ProtectedJob:
    config = SimpleNamespace(agent=SimpleNamespace(run_dir=str(tmp_path)), store=SimpleNamespace(root=str(tmp_path)))
    job = ProtectedJob(SimpleNamespace(config=config, node="n1"), "7")  # type: ignore[arg-type]
    job.phase = Phase.RUNNING
    for directory in (job.run_dir.steps, Path(job.run_dir.user)):
        directory.mkdir(parents=True)
    return job


def step_of(launch: str, pid: int) -> Step:
    where: dict[str, Any] = {"port": 1, "token": "t", "argv": ["true"], "env": {}, "cwd": "/", "umask": 0o22}
    return Step(KEY, **where, pid=pid, start=start_time(pid) or 0, launch=launch)


def test_the_end_of_an_earlier_start_ends_nothing(
    tmp_path: Path, wrapper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The srun of a run that was killed ends late, when the job has come back to the same node."""

    async def run() -> list[wire.Frame]:
        job = job_of(tmp_path)
        shepherd = Shepherd()
        monkeypatch.setattr(job, "capsule", SimpleNamespace())
        monkeypatch.setattr(job, "save", lambda: None)
        job.steps._control = shepherd  # type: ignore[assignment]
        step = step_of("second", wrapper.pid)
        job.steps.steps[KEY] = step
        for name in (job.run_dir.step_status(step_of("first", os.getpid()).run), job.run_dir.step_status(KEY)):
            name.write_text("256")
        (job.run_dir.steps / f"{step.run}.err").touch()
        words = job.run_dir.steps / f"{step.run}.out"
        words.write_text("words of the second\n")
        watching = asyncio.ensure_future(job.steps.watch(step))
        while not shepherd.told:
            await asyncio.sleep(0.01)
        # Two more looks at the results, so that a wrong one would have been taken by now.
        words.write_text("words of the second\nmore\n")
        while len(shepherd.told) < 2:
            await asyncio.sleep(0.01)
        assert not watching.done()
        job.run_dir.step_status(step.run).write_text("0")
        await asyncio.wait_for(watching, 10)
        job.phase = Phase.NEW
        return shepherd.told

    told = asyncio.run(run())
    assert [wire.Type.OUTPUT, wire.Type.OUTPUT, wire.Type.SRUNEND] == [frame.type for frame in told]
    assert 0 == told[-1].int("STATUS")


def test_state_is_what_json_gives_back() -> None:
    """Also of a step of which a task has ended: a manifest with it would not read back, and no checkpoint be made."""
    steps = Steps(cast(Any, None))
    steps.on_node["1"] = StepOnNode("1", "10.200.0.1:5", "token", tasks=2, ended={0: 256, 11: 0})
    state = steps.state()
    assert json.loads(json.dumps(state)) == state
    again = Steps(cast(Any, None))
    again.adopt(state)
    assert again.on_node == steps.on_node


class Started(Exception):
    """In place of the real srun."""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ProtectedJob, list[dict[str, Any]]]:
    """A job of two nodes whose agent has just begun: the batch supervisor is known by the journal alone. The orders to
    all nodes."""
    job, orders = job_of(tmp_path), list[dict[str, Any]]()
    job.batch = [os.getpid(), start_time(os.getpid())]
    job.geometry = network.Geometry(("a", "b"), ("n1", "n2"), ("192.0.2.1", "192.0.2.2"))
    job.context.config.network = NetworkConfig()  # type: ignore[misc]

    async def on_all(verb: str, **fields: Any) -> None:
        orders.append({"verb": verb, **fields})

    async def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(job, "on_all", on_all)
    monkeypatch.setattr(job, "save", lambda: None)
    monkeypatch.setattr(steps, "find_program", lambda name: name)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    return job, orders


def request() -> wire.Frame:
    return wire.make(wire.Type.SRUN, ("ARG", ["true"]), KEY=KEY, PORT=1, TOKEN="t", CWD="/")


def test_a_step_is_started_before_the_batch_supervisor_is_back(
    launched: tuple[ProtectedJob, list[dict[str, Any]]],
) -> None:
    job, orders = launched
    step = step_of("", 0)
    with pytest.raises(Started):
        asyncio.run(job.steps.launch(step, srun_args.parse(["true"]), {}))
    assert [order["verb"] for order in orders] == ["step"]


def test_a_srun_is_told_of_any_failure(launched: tuple[ProtectedJob, list[dict[str, Any]]]) -> None:
    """It would wait for ever."""
    job, _ = launched
    shepherd = Shepherd()
    job.steps._control = shepherd  # type: ignore[assignment]
    asyncio.run(job.steps._request(request()))
    assert shepherd.told[-1].type is wire.Type.SRUNEND
    assert exit_code(shepherd.told[-1].int("STATUS")) == 1
    assert job.steps.steps == {}


def test_another_nodes_agent_may_be_restarting(
    launched: tuple[ProtectedJob, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = launched
    monkeypatch.setattr(steps, "_WATCH_INTERVAL_S", 0.01)
    lost, asked = [1, 2, 3], list[str]()

    async def on_all(verb: str, **_: Any) -> None:
        asked.append(verb)
        if lost and lost.pop():
            raise PeerLost(job="7", node="n2", reason="refused")

    monkeypatch.setattr(job, "on_all", on_all)
    with pytest.raises(Started):
        asyncio.run(job.steps.launch(step_of("", 0), srun_args.parse(["true"]), {}))
    assert len(asked) == 4
    monkeypatch.setattr(steps, "_ANNOUNCE_LIMIT_S", 0.05)
    lost[:] = [1] * 1000
    with pytest.raises(PeerLost):
        asyncio.run(job.steps.launch(step_of("", 0), srun_args.parse(["true"]), {}))


def test_a_step_that_was_never_started_is_not_known(tmp_path: Path) -> None:
    """The agent was killed between its announcement and its start: the shepherd asks again."""
    job = job_of(tmp_path)
    job.steps.adopt({"steps": [step_of("first", 0).as_dict(), step_of("second", os.getpid()).as_dict() | {"key": "k"}]})
    assert list(job.steps.steps) == ["k"]


def test_the_end_of_a_srun_is_told_again(launched: tuple[ProtectedJob, list[dict[str, Any]]]) -> None:
    """The shepherd had let go when it was told: it asks for the step again, which must not run twice; also by the
    journal and in an image."""
    job, _ = launched
    job.steps.ended[KEY] = 5 << 8
    other = job_of(Path(job.run_dir.path) / "other")
    other.steps.adopt(json.loads(json.dumps(job.steps.state())))
    for each in (job, other):
        shepherd = Shepherd()
        each.steps._control = shepherd  # type: ignore[assignment]
        asyncio.run(each.steps._request(request()))
        assert [(f.type, f.int("STATUS")) for f in shepherd.told] == [(wire.Type.SRUNEND, 5 << 8)]


def test_a_pipe_in_place_of_a_status_holds_nobody_up(tmp_path: Path) -> None:
    """The directory is the user's."""
    os.mkfifo(tmp_path / "status")
    assert exit_code(steps._read_status(tmp_path / "status")) == 1
