"""Cuts of programs under the interposer: what cannot be cut, who waits for whom, what a report says of cards."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpucr_hpc.engine.nccl.cut import Cut
from gpucr_hpc.engine.nccl.link import Link, Pairs
from gpucr_hpc.engine.nccl.node import NodeRanks
from gpucr_hpc.engine.nccl.report import shared_cards
from gpucr_hpc.errors import NcclCutNotReached, NcclUnprotected
from gpucr_hpc.wire import Frame
from tests.nccl.loaded import answer, program, rank, ready


def test_a_captured_operation_is_refused_by_name(tmp_path: Path) -> None:
    child = program(
        tmp_path, "cuda.fake_capture(stream, 1)\nreduce()\nreduce()\nprint('ready', flush=True)\nsys.stdin.readline()"
    )
    ready(child)

    async def once() -> None:
        ranks = await rank(tmp_path, child.pid)
        cut = Cut("1", [ranks])
        with pytest.raises(NcclUnprotected, match="CUDA graph"):
            await cut.take(5)
        await ranks.close()

    asyncio.run(once())
    _, said = child.communicate("\n", 20)
    assert said.count("is not protected") == 1


def test_a_capture_is_not_spoilt(tmp_path: Path) -> None:
    """A CUDA graph without NCCL's operations: a cut waits for the end of its capture before it waits for the GPU."""
    code = """
        graph = ctypes.c_void_p()
        assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
        print('ready', flush=True)
        sys.stdin.readline()
        assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        for _ in range(100):
            assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
            assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        assert reduce() == 0
    """
    child = program(tmp_path, code)
    ready(child)

    async def once() -> None:
        ranks = await rank(tmp_path, child.pid)
        cut = Cut("1", [ranks])
        taking = asyncio.ensure_future(cut.take(15))
        done, _ = await asyncio.wait([taking], timeout=0.5)
        assert not done
        answer(child)
        await taking
        await cut.tear_down(5)
        await cut.bring_back(5)
        await ranks.close()

    asyncio.run(once())
    assert child.communicate(timeout=20) == ("", "")
    assert child.returncode == 0


def test_an_operation_that_cannot_end_is_given_up(tmp_path: Path) -> None:
    """Time limit: the gate opens, the program goes on, and a later cut succeeds."""
    code = """
        wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: sys.stdin.readline())
        cuda.fake_enqueue(stream, wait, None)
        print('ready', flush=True)
        assert reduce() == 0
        cuda.fake_stream_wait(stream)
        print('ready', flush=True)
        sys.stdin.readline()
        assert reduce() == 0
    """
    child = program(tmp_path, code)
    ready(child)

    async def fails() -> None:
        one = await rank(tmp_path, child.pid)
        with pytest.raises(NcclCutNotReached):
            await Cut("1", [one]).take(0.3)
        await one.close()

    async def succeeds() -> None:
        ranks = await rank(tmp_path, child.pid)
        cut = Cut("1", [ranks])
        await cut.bring_back(5)  # waits for the end of the one that was given up, as the agent does
        await cut.take(5)
        await cut.tear_down(5)
        await cut.bring_back(5)
        await ranks.close()

    asyncio.run(fails())
    answer(child)
    ready(child)
    asyncio.run(succeeds())
    child.communicate("\n", 20)
    assert child.returncode == 0


PAIR = """
    import time
    path = "{folder}/id"
    if {rank} == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
        open(path + ".part", "wb").write(bytes(unique))
        os.rename(path + ".part", path)
    while not os.path.exists(path): time.sleep(0.001)
    both = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(both), 2, Id.from_buffer_copy(open(path, "rb").read()), {rank}) == 0
    if {rank} == 0:
        assert nccl.ncclSend(a, ctypes.c_size_t(4), 4, 1, both, stream) == 0
    print("ready", flush=True)
    if {rank} == 0:
        sys.stdin.readline()
        assert reduce() == 0
        open("{folder}/go", "w")
    else:
        while not os.path.exists("{folder}/go"): time.sleep(0.001)
        assert nccl.ncclRecv(b, ctypes.c_size_t(4), 4, 0, both, stream) == 0
    cuda.fake_stream_wait(stream)
    sys.stdin.readline()
    assert nccl.ncclCommDestroy(both) == 0
"""


class Watched(NodeRanks):
    """Says when the gates are shut."""

    def __init__(self, links: list[Link]) -> None:
        super().__init__(links)
        self.shut = asyncio.Event()

    async def order(self, word: str, pairs: Pairs = (), at: int | None = None) -> list[Frame]:
        found = await super().order(word, pairs, at)
        if word == "cut":
            self.shut.set()
        return found


def test_a_rank_that_waits_for_another_outside_of_nccl(tmp_path: Path) -> None:
    """One is behind, and waits by a file, as for a store, for one that is not, and that stands at the gate."""
    children = [program(tmp_path, PAIR.format(folder=tmp_path, rank=number)) for number in (0, 1)]
    for child in children:
        ready(child)

    async def once() -> None:
        links = [await Link.connect(tmp_path / f"gpucr-nccl.{child.pid}", child.pid, os.getuid()) for child in children]
        ranks = Watched(links)
        cut = Cut("1", [ranks])
        taking = asyncio.ensure_future(cut.take(15))
        await ranks.shut.wait()
        answer(children[0])
        await taking
        await cut.tear_down(5)
        await cut.bring_back(5)
        await ranks.close()

    asyncio.run(once())
    for child in children:
        answer(child)
    assert [("", ""), ("", "")] == [child.communicate(timeout=20) for child in children]
    assert [0, 0] == [child.returncode for child in children]


@pytest.mark.parametrize("card", ["one", None])
def test_ranks_on_one_card_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str | None) -> None:
    """By what the driver says of the communicators' devices, whose numbers are 0 in each process."""
    if card:
        monkeypatch.setenv("FAKE_CARD", card)
    children = [program(tmp_path, PAIR.format(folder=tmp_path, rank=number)) for number in (0, 1)]
    for child in children:
        ready(child)

    async def cards() -> list[frozenset[str]]:
        found = []
        for child in children:
            one = await rank(tmp_path, child.pid)
            found += [report.cards for report in await Cut("1", [one]).ask()]
            await one.close()
        return found

    found = asyncio.run(cards())
    assert [len(one) for one in found] == [1, 1]
    assert len(shared_cards(found)) == (1 if card else 0)
    for child in children:
        answer(child, "\n" if child is children[1] else "\n\n")
    assert [("", ""), ("", "")] == [child.communicate(timeout=20) for child in children]


def test_a_single_rank_shares_no_card(tmp_path: Path) -> None:
    child = program(tmp_path, "print('ready', flush=True)\nsys.stdin.readline()")
    ready(child)

    async def cards() -> list[frozenset[str]]:
        one = await rank(tmp_path, child.pid)
        found = [report.cards for report in await Cut("1", [one]).ask()]
        await one.close()
        return found

    assert asyncio.run(cards()) == [frozenset()]
    child.communicate("\n", timeout=20)
