"""A checkpoint in which memory could not be read beside CRIU: it is tried again by CRIU alone, at once."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import checkpointing, participant
from gpucr_hpc.config import CudaConfig, EngineConfig
from gpucr_hpc.errors import DumpFailed, MemoryUnreadable

UNREADABLE = MemoryUnreadable(reason="Input/output error at 0x1000")


def job_for(limit_s: float = 60.0) -> Any:
    config = SimpleNamespace(cuda=CudaConfig(), engine=EngineConfig(dump_timeout_s=limit_s))
    capsule = SimpleNamespace(job="7", node_rank=0, init_pid=1, alive=lambda: True)
    context = SimpleNamespace(config=config)
    return SimpleNamespace(job="7", capsule=capsule, beside=True, run_dir=None, dumping=None, context=context)


async def nothing(*_: object) -> None:
    """Done."""


@pytest.mark.parametrize(("error", "beside"), [(UNREADABLE, False), (DumpFailed(reason="no", log="no"), True)])
def test_next_dump_of_the_job_leaves_it_to_criu(
    monkeypatch: pytest.MonkeyPatch, error: Exception, beside: bool
) -> None:
    """Not after a failure of another kind: that says nothing about the memory."""
    job, asked = job_for(), []

    class Dump:
        def __init__(self, *_: object, beside: bool) -> None:
            asked.append(beside)

        async def capture(self) -> None:
            raise error

    monkeypatch.setattr(participant, "Dump", Dump)
    monkeypatch.setattr(participant, "namespace_processes", lambda _: [])
    worker: Any = SimpleNamespace()
    part = participant.LocalParticipant(job, worker, checkpoint="c", data_key="", leave_running=True)
    part._gpus = SimpleNamespace(processes=[], checkpoint=nothing, verify=lambda _: None)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(type(error)):
            asyncio.run(part.capture())
    assert [True, beside] == asked


def attempts(monkeypatch: pytest.MonkeyPatch, results: list[Exception | None], limit_s: float = 60.0) -> list[int]:
    """Numbers of the tries of a checkpoint whose tries end so."""
    made: list[int] = []

    class Checkpoint:
        def __init__(self, *_: object) -> None:
            made.append(len(made) + 1)

        async def take(self) -> dict[str, Any]:
            result = results[len(made) - 1]
            if result is not None:
                raise result
            return {}

    monkeypatch.setattr(checkpointing, "_Checkpoint", Checkpoint)
    asyncio.run(checkpointing.checkpoint(job_for(limit_s), "demand", leave=False, info=None, since=time.monotonic()))
    return made


def test_checkpoint_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of a job may meet it once."""
    assert [1, 2, 3] == attempts(monkeypatch, [UNREADABLE, UNREADABLE, None])


def test_checkpoint_without_time_left_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs on, or ends when Slurm says so."""
    with pytest.raises(MemoryUnreadable):
        attempts(monkeypatch, [UNREADABLE, None], limit_s=1.0)
