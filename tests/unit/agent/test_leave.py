"""The last part of a move, on the first node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import checkpointing
from gpucr_hpc.agent.phase import Phase


def test_a_job_that_slurm_has_ended_meanwhile_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node is waited for so long that Slurm may kill the batch step: then its end takes the geometry away."""
    done: list[object] = []
    job: Any = SimpleNamespace(job="7", geometry=SimpleNamespace(nodes=("n1", "n2")), excluded="n9", run=3)
    job.set_phase = done.append
    job.spawn = lambda work: work.close()

    async def ask(_job: str) -> str:
        job.geometry = None
        return "info"

    async def keep_away(info: str, nodes: list[str], excluded: str, *, elsewhere: bool) -> None:
        done.append((info, nodes, excluded, elsewhere))

    async def leave(message: str) -> None:
        done.append(message)

    job.leave = leave
    monkeypatch.setattr(checkpointing.slurm, "job", ask)
    monkeypatch.setattr(checkpointing.slurm, "keep_away", keep_away)
    asyncio.run(checkpointing._leave(job, "it leaves", None, elsewhere=True))
    assert done == [Phase.LEAVING, ("info", ["n1", "n2"], "n9", True), "it leaves"]
