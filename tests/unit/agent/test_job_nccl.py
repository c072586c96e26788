"""The return of a job's communicators after a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import nccl
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.nccl.link import Pairs
from gpucr_hpc.errors import NcclFailed, NcclUnprotected, PeerLost


class Rank:
    """One process of this node, from some state on; refuses what does not fit it, as a helper does."""

    def __init__(self, state: str = "open", why: str = "", cards: tuple[str, ...] = ()) -> None:
        self.state, self.why, self.cards, self.lost = state, why, cards, False

    async def order(self, word: str, pairs: Pairs = (), at: int | None = None) -> list[wire.Frame]:  # noqa: ARG002
        fields = dict(pairs)
        moves = {("gone", "rebuild"): "rebuilt", ("rebuilt", "open"): "open", ("open", "open"): "open"}
        if word == "open" and fields["LOST"] == "1":
            self.state, self.lost = "open", True
        elif (self.state, word) in moves:
            self.state = moves[self.state, word]
        elif word != "ask":
            raise NcclFailed(pid=1, reason=f"it refused {word} in {self.state}")
        frame = [("STATE", self.state), ("VERSION", "0"), ("BUSY", "0"), ("UNPROTECTED", self.why)]
        return [wire.Frame(wire.Type.NCCLSTATE, (*frame, ("CARD", card))) for card in self.cards] or [
            wire.Frame(wire.Type.NCCLSTATE, tuple(frame))
        ]

    async def close(self) -> None: ...


class Job:
    """What `nccl` asks of a ProtectedJob: this node has one rank, and there is another node, whose agent is away."""

    def __init__(self, folder: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch, *, away: bool = False) -> None:
        self.job, self.run, self.nccl_turn, self.said = "7", 0, asyncio.Lock(), list[str]()
        self.capsule = SimpleNamespace(alive=lambda: True)
        self.geometry = SimpleNamespace(others=[("n2", "10.0.0.2")] if away else [])
        self.run_dir = SimpleNamespace(quiet=folder / "quiet")
        self.context = SimpleNamespace(config=SimpleNamespace(cuda=CudaConfig()), connector=self)
        self.supervisors = {"batch": self}

        async def ranks_here(_job: object) -> Rank:
            return rank

        monkeypatch.setattr(nccl, "ranks_here", ranks_here)

    async def open(self, job: str, node: str, address: str) -> Any:  # noqa: ARG002
        raise PeerLost(job=job, node=node, reason="nobody listens")

    async def print(self, message: str) -> None:
        self.said.append(message)


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
        quiesce = nccl.JobNccl(job, wanted=lambda: True, needed=lambda: True)
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


def test_an_agent_that_stays_away_lets_no_rank_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks here get errors from NCCL, so that the job ends; its output says why."""
    monkeypatch.setattr(nccl, "_RETURN_LIMIT_S", 2.0)
    monkeypatch.setattr(nccl, "_PAUSE_S", 0.01)

    async def run() -> None:
        rank = Rank("gone")
        job: Any = Job(tmp_path, rank, monkeypatch, away=True)
        job.run_dir.quiet.touch()
        await asyncio.wait_for(nccl.bring_back(job), 20)
        assert (rank.state, rank.lost, job.run_dir.quiet.exists()) == ("open", True, False)
        assert ["nobody listens" in text for text in job.said] == [True]

    asyncio.run(run())


def test_a_node_that_hangs_is_not_waited_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_RETURN_LIMIT_S", 0.2)

    async def run() -> None:
        rank = Rank("gone")
        job: Any = Job(tmp_path, rank, monkeypatch)
        ask = rank.order

        async def hang(word: str, pairs: Pairs = (), at: int | None = None) -> list[wire.Frame]:
            if word == "rebuild":
                await asyncio.sleep(60)
            return await ask(word, pairs, at)

        monkeypatch.setattr(rank, "order", hang)
        await asyncio.wait_for(nccl.bring_back(job), 20)
        assert (rank.state, rank.lost, len(job.said)) == ("open", True, 1)

    asyncio.run(run())


def test_communicators_come_back_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        rank = Rank("gone")
        job: Any = Job(tmp_path, rank, monkeypatch)
        await nccl.bring_back(job)
        assert (rank.state, rank.lost, job.said) == ("open", False, [])

    asyncio.run(run())


@pytest.mark.parametrize("needed", [True, False])
def test_what_cannot_be_taken_away_stops_a_checkpoint_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    """A rank on one node holds a CUDA graph; those of another were let through because NCCL would be taken away."""

    async def run() -> None:
        job: Any = Job(tmp_path, Rank(why="a CUDA graph holds NCCL operations"), monkeypatch)
        quiesce = nccl.JobNccl(job, wanted=lambda: True, needed=lambda: needed)
        if needed:
            with pytest.raises(NcclUnprotected, match="CUDA graph"):
                await quiesce.take(10)
        else:
            await quiesce.take(10)
        assert not quiesce.taken

    asyncio.run(run())


def test_ranks_that_came_to_share_a_card_stop_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `prepare` had found nothing; nothing is taken away."""

    async def run() -> None:
        rank = Rank(cards=("a", "a"))  # two processes
        quiesce = nccl.JobNccl(Job(tmp_path, rank, monkeypatch), wanted=lambda: True, needed=lambda: False)  # type: ignore[arg-type]
        with pytest.raises(NcclUnprotected, match="share a card"):
            await quiesce.take(10)
        assert (rank.state, quiesce.taken) == ("open", False)

    asyncio.run(run())


def test_communicators_that_are_coming_back_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a checkpoint asks the ranks anything; not for longer than there is time."""

    async def run() -> None:
        job: Any = Job(tmp_path, Rank(), monkeypatch)
        quiesce = nccl.JobNccl(job, wanted=lambda: True, needed=lambda: True)
        await quiesce.settled(10)
        async with job.nccl_turn:
            await asyncio.wait_for(quiesce.settled(0.05), 10)
            waits = asyncio.ensure_future(quiesce.settled(30))
            await asyncio.sleep(0)
            assert not waits.done()
        await asyncio.wait_for(waits, 10)
        assert not job.nccl_turn.locked()

    asyncio.run(run())
