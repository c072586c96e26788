"""Which jobs a drain moves, waits for or requeues, by what the agents say of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.cli import draining
from gpucr_hpc.cli.draining import Drain
from gpucr_hpc.errors import AgentUnreachable

SILENT: dict[str, Any] = {"node": "n1", "problem": "no answer", "jobs": []}
WITHOUT: dict[str, Any] = {"node": "n1", "jobs": []}
WITH: dict[str, Any] = {"node": "n1", "jobs": [{"job": 7, "node_rank": 0}]}


class Site:
    """One job on n1, and an agent there that says in turn what it is given, the last for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> None:
        self.answers, self.done, self.there = list(answers), [], True  # type: list[dict[str, Any]], list[str], bool
        monkeypatch.setattr(draining, "_LOOK_INTERVAL_S", 0.01)
        monkeypatch.setattr(draining, "_RETRY_S", 0.01)
        monkeypatch.setattr(draining, "ask", self.ask)
        monkeypatch.setattr(draining, "slurm", SimpleNamespace(jobs_on=self.jobs_on, requeue=self.requeue))

    async def jobs_on(self, _nodes: list[str]) -> list[Any]:
        return [SimpleNamespace(job="7", uid=1, nodes="n1", batch_host="n1", running=True)] if self.there else []

    async def requeue(self, job: str) -> None:
        self.done.append(f"requeue {job}")
        self.there = False

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        if what == "status":
            return {"nodes": [self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]]}
        self.done.append(f"{what} {fields['job']}")
        self.there = False
        return {"checkpoint": {"checkpoint": "c", "bytes_stored": 1}}

    def drain(self, others: str, limit_s: float | None = 60.0) -> tuple[bool, Drain]:
        work = Drain(["n1"], others=others, parallel=1, show=lambda _: None)

        async def run() -> bool:
            return await work.run(None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

        return asyncio.run(run()), work


@pytest.mark.parametrize("others", ["wait", "requeue"])
@pytest.mark.parametrize("before", [[], [SILENT], [SILENT, SILENT, SILENT]], ids=["answers", "late", "later"])
def test_agent_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch, others: str, before: list[dict[str, Any]]) -> None:
    """A protected job is not taken for one that may be thrown away."""
    site = Site(monkeypatch, *before, WITH)
    empty, _ = site.drain(others)
    assert (True, ["checkpoint 7"]) == (empty, site.done)


@pytest.mark.parametrize("others", ["wait", "requeue"])
def test_agent_never_answers(monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    """The job is left alone, and the reason is said."""
    site = Site(monkeypatch, SILENT)
    empty, work = site.drain(others, limit_s=0.2)
    assert (False, []) == (empty, site.done)
    assert "the agent on n1 does not answer" in work.jobs[0].detail


def test_job_that_is_protected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had just begun when the command first looked."""
    site = Site(monkeypatch, WITHOUT, WITHOUT, WITH)
    assert site.drain("wait")[0]
    assert ["checkpoint 7"] == site.done


def test_job_without_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch, WITHOUT)
    assert site.drain("requeue")[0]
    assert ["requeue 7"] == site.done
    site = Site(monkeypatch, WITHOUT)
    empty, work = site.drain("wait", limit_s=0.2)
    assert (False, []) == (empty, site.done)
    assert "not protected, its end is waited for" in work.jobs[0].detail


def test_checkpoint_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch, WITH)
    good, failures = site.ask, [1, 2]

    def ask(what: str, **fields: Any) -> dict[str, Any]:
        if what == "checkpoint" and failures:
            failures.pop()
            raise AgentUnreachable(path="/run", reason="gone")
        return good(what, **fields)

    monkeypatch.setattr(draining, "ask", ask)
    assert site.drain("wait")[0]
    assert ["checkpoint 7"] == site.done


def test_a_job_that_ends_just_now_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """COMPLETING: it is on the node, and nothing can be done. Without a deadline, too."""
    site, looks = Site(monkeypatch, WITHOUT), [1] * 7

    async def jobs_on(_nodes: list[str]) -> list[Any]:
        job = SimpleNamespace(job="7", uid=1, nodes="n1", batch_host="n1", running=False)
        return [job] if looks and looks.pop() else []

    monkeypatch.setattr(draining, "slurm", SimpleNamespace(jobs_on=jobs_on))
    assert site.drain("wait", limit_s=None)[0]
    assert (looks, site.done) == ([], [])


def test_without_a_deadline_it_ends_when_nothing_more_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch, WITH)

    def ask(what: str, **fields: Any) -> dict[str, Any]:
        if what == "checkpoint":
            raise AgentUnreachable(path="/run", reason="gone")
        return site.ask(what, **fields)

    monkeypatch.setattr(draining, "ask", ask)
    empty, work = site.drain("wait", limit_s=None)
    assert (empty, work.jobs[0].state) == (False, "failed")
