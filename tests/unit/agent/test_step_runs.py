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
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.steps import Step, StepOnNode, Steps
from gpucr_hpc.capsule.processes import start_time

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
