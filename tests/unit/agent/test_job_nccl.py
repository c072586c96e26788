"""The return of a job's communicators after a checkpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpucr_hpc.agent import nccl


def test_a_return_that_is_cut_off_goes_on_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is given up for one with which the job leaves: what some ranks have been told all must be told."""
    journal: list[str] = []
    job: Any = object()

    async def run() -> None:
        begun, end = asyncio.Event(), asyncio.Event()

        async def bring_back(which: object) -> None:
            assert which is job
            journal.append("begun")
            begun.set()
            await end.wait()
            journal.append("back")

        monkeypatch.setattr(nccl, "bring_back", bring_back)
        quiesce = nccl.JobNccl(job, lambda: True)
        await quiesce.give_back()
        assert journal == [], "nothing was taken"
        quiesce.taken = True
        first = asyncio.ensure_future(quiesce.give_back())
        await begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.ensure_future(quiesce.give_back())
        await asyncio.sleep(0)
        assert not again.done()
        end.set()
        await again
        await quiesce.give_back()
        assert quiesce.taken, "the manifest, written after it, says that the images have no communicators"

    asyncio.run(run())
    assert journal == ["begun", "back"]
