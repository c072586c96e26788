"""The end of a lead's connection, on another node of the job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent.member import MemberSession
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.errors import DumpFailed


@pytest.mark.parametrize("word", ["finish", "connection ends"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "with an error"])
def test_no_worker_stays_when_the_job_has_left(monkeypatch: pytest.MonkeyPatch, word: str, fails: bool) -> None:
    """Whether the lead says so or dies with its node right after the requeue."""
    done: list[str] = []

    async def finish() -> None:
        done.append("finished")
        if fails:
            raise DumpFailed(reason="no", log="no")

    async def close() -> None:
        done.append("worker ended")

    async def leave(_: str) -> None:
        done.append("left")

    async def has_left(*_: object) -> bool:
        return True

    job: Any = SimpleNamespace(job="7", phase=Phase.REQUEUEING, leave=leave, node_rank=2, forgettable=True)
    jobs: dict[str, Any] = {"7": job}
    session = MemberSession(SimpleNamespace(node="n2"), jobs)  # type: ignore[arg-type]
    session._job, session._leave = job, True
    session._participant = SimpleNamespace(finish=finish)  # type: ignore[assignment]
    session._worker = SimpleNamespace(close=close)  # type: ignore[assignment]
    monkeypatch.setattr(session, "_has_left", has_left)
    end = session.do_finish("7") if word == "finish" else session.close()
    if fails:
        with pytest.raises(DumpFailed):
            asyncio.run(end)
        assert done == ["finished", "worker ended"]
    else:
        asyncio.run(end)
        assert done == ["finished", "worker ended", "left"]
        assert jobs == {}
