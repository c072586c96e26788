"""The undo of a checkpoint on one node: whatever a step of it meets, the others are carried out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import participant
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.errors import CapsuleError, DumpFailed, HostError

STEPS = ["worker", "dump", "network", "gpus", "gpus closed"]
ERRORS = [
    ProcessLookupError(),
    HostError(reason="gone"),
    DumpFailed(reason="no", log="no"),
    CapsuleError(job="7", node="n1", reason="no"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("failing", STEPS)
def test_every_step_is_carried_out(monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception) -> None:
    """A worker that ends as it is killed once left a tree frozen for ever."""
    done: list[str] = []

    def step(name: str) -> Any:
        async def run(*_: object) -> None:
            done.append(name)
            if name == failing:
                raise error

        run.__name__ = name
        return run

    capsule = SimpleNamespace(job="7", node_rank=0, alive=lambda: True)
    job: Any = SimpleNamespace(
        job="7", capsule=capsule, dumping=None, context=SimpleNamespace(config=SimpleNamespace(cuda=CudaConfig()))
    )
    worker: Any = SimpleNamespace(abandon=step("worker"))
    part = participant.LocalParticipant(job, worker, checkpoint="c", data_key="", leave_running=True)
    part._dump = SimpleNamespace(undo=step("dump"))  # type: ignore[assignment]
    part._gpus = SimpleNamespace(resume=step("gpus"), close=step("gpus closed"))  # type: ignore[assignment]
    part._locked = True
    monkeypatch.setattr(participant, "remove_link_remaps", lambda _: None)
    monkeypatch.setattr(participant.network, "unlock", step("network"))
    asyncio.run(part.undo())
    assert STEPS == done
