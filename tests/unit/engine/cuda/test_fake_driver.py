"""The fake driver refuses a wrong order, and the layers above it lead every process back to RUNNING."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr_hpc.capsule.processes import Process, read_process
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import client
from gpucr_hpc.engine.cuda.client import CudaWorker
from gpucr_hpc.engine.cuda.driver import CallFailed, State
from gpucr_hpc.engine.cuda.fake import FakeDriver
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.errors import (
    CudaCallFailed,
    CudaHung,
    CudaMemoryTaken,
    CudaNotSupported,
    CudaProcessFailed,
    CutNotPossible,
    HostError,
)

PROGRAM = """
import mmap, sys
file = open(sys.argv[1], "r+b")
held = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
sys.stdin.read()
"""
CONFIG = CudaConfig(copy_limit_s=2.0, memory_wait_s=0.0)


class Card:
    """A directory of the fake driver and two processes that have "libcuda.so" mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = path / "libcuda.so.1"
        library.write_bytes(b"x" * 4096)
        self.children = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(library)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "GPUCR_FAKE_GPU": name},
            )
            for name in ("a", "b")
        ]
        for child in self.children:
            assert child.stdout is not None
            assert b"ready\n" == child.stdout.readline()

    def inject(self, *lines: str) -> None:
        (self.path / "inject").write_text("".join(f"{line}\n" for line in lines))

    def states(self) -> list[str]:
        found = [self.path / f"state-{name}" for name in ("a", "b")]
        return [path.read_text() if path.exists() else "RUNNING" for path in found]

    def journal(self) -> list[str]:
        path = self.path / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def processes(self) -> list[Process]:
        return [p for p in (read_process(child.pid) for child in self.children) if p is not None]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setenv(client.FAKE_VARIABLE, str(tmp_path))
    made = Card(tmp_path)
    yield made
    made.close()


def run(card: Card, work) -> NodeGpus:
    """Find the processes, do something with them, end the workers."""

    async def whole() -> NodeGpus:
        gpus = NodeGpus("7", CONFIG)
        try:
            await gpus.find(card.processes())
            await work(gpus)
        finally:
            await gpus.close()
        return gpus

    return asyncio.run(whole())


async def out(gpus: NodeGpus) -> None:
    await gpus.lock()
    await gpus.checkpoint()


# --- the fake itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "call"),
    [
        (State.RUNNING, "checkpoint"),
        (State.RUNNING, "restore"),
        (State.RUNNING, "unlock"),
        (State.LOCKED, "lock"),
        (State.LOCKED, "restore"),
        (State.CHECKPOINTED, "lock"),
        (State.CHECKPOINTED, "unlock"),
        (State.CHECKPOINTED, "checkpoint"),
        (State.FAILED, "lock"),
        (State.FAILED, "unlock"),
    ],
)
def test_wrong_order_is_refused(tmp_path, before, call):
    """As the driver does it: ILLEGAL_STATE, and the state stays."""
    fake = FakeDriver(str(tmp_path))
    fake._write(os.getpid(), before)
    arguments = {"lock": (500,), "restore": ({},)}.get(call, ())
    with pytest.raises(CallFailed, match="ILLEGAL_STATE"):
        getattr(fake, call)(os.getpid(), *arguments)
    assert before == fake.state(os.getpid())


def test_injected_results_are_used_up(tmp_path):
    fake = FakeDriver(str(tmp_path))
    (tmp_path / "inject").write_text("lock 600 2\n")
    for _ in range(2):
        with pytest.raises(CallFailed, match="NOT_READY"):
            fake.lock(os.getpid(), 500)
    fake.lock(os.getpid(), 500)
    assert State.LOCKED == fake.state(os.getpid())


# --- processes through workers ------------------------------------------------------------------------------


def test_nothing_is_started_without_gpu_processes(card):
    """A job without GPUs costs no worker and no call."""

    async def work() -> None:
        gpus = NodeGpus("7", CONFIG)
        me = read_process(os.getpid())
        assert me is not None
        await gpus.find([me])
        assert not gpus
        await out(gpus)
        await gpus.resume()
        assert {} == gpus._workers

    asyncio.run(work())
    assert [] == card.journal()


def test_out_and_back(card):
    async def work(gpus: NodeGpus) -> None:
        assert ["a", "b"] == [f"{'ab'[i]}" for i, _ in enumerate(gpus.processes)]
        await out(gpus)
        assert ["CHECKPOINTED"] * 2 == card.states()
        await gpus.restore({})
        assert ["LOCKED"] * 2 == card.states()
        await gpus.go()

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


def test_one_that_is_not_ready_lets_all_go(card):
    """No process stays locked when the cut is not possible now, and it is worth another try."""
    card.inject("lock 600")

    async def work(gpus: NodeGpus) -> None:
        with pytest.raises(CutNotPossible, match="did not come to rest"):
            await gpus.lock()
        assert ["RUNNING"] * 2 == card.states()
        await gpus.lock()
        assert ["LOCKED"] * 2 == card.states()

    run(card, work)


@pytest.mark.parametrize(
    ("inject", "error", "text"),
    [
        ("checkpoint 801", CudaNotSupported, "refused by the driver"),
        ("checkpoint 999", CudaCallFailed, "CUDA_ERROR_UNKNOWN"),
        ("checkpoint 304", CutNotPossible, "OPERATING_SYSTEM"),  # worth another try
        ("checkpoint hang", CudaHung, "not answered within"),
        ("checkpoint die", HostError, "worker died"),
        ("lock die", HostError, "worker died"),
        ("lock 401", CudaCallFailed, "ILLEGAL_STATE"),
    ],
)
def test_every_failure_ends_running(card, inject, error, text):
    """Whatever a call does, undo brings both processes back, also the one whose call succeeded."""
    card.inject(inject)

    async def work(gpus: NodeGpus) -> None:
        with pytest.raises(error, match=text):
            await out(gpus)
        await gpus.resume()

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


@pytest.mark.parametrize("inject", ["restore 999", "restore die", "unlock 999", "unlock die", "state die"])
def test_failures_on_the_way_back_are_tried_again(card, inject):
    async def work(gpus: NodeGpus) -> None:
        await out(gpus)
        card.inject(inject)
        await gpus.resume()

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


def test_memory_that_is_taken(card):
    """The process stays as it is, so that another try can succeed."""

    async def work(gpus: NodeGpus) -> None:
        await out(gpus)
        card.inject("restore 2 2")
        with pytest.raises(CudaMemoryTaken):
            await gpus.restore({})
        assert "CHECKPOINTED" in card.states()
        await gpus.resume()

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


def test_process_that_the_driver_gave_up(card, capfd):
    """FAILED is final: it is said, and nothing waits for ever."""
    card.inject("checkpoint fail")

    async def work(gpus: NodeGpus) -> None:
        with pytest.raises(CudaCallFailed):
            await out(gpus)
        with pytest.raises(CudaProcessFailed):
            await gpus.go()
        await gpus.resume()

    run(card, work)
    assert sorted(["FAILED", "RUNNING"]) == sorted(card.states())


def test_next_agent_brings_back_what_it_finds(card):
    """State is asked, not remembered: one process locked, one with its memory on the host."""
    fake = FakeDriver(str(card.path))
    for child, calls in zip(card.children, (("lock",), ("lock", "checkpoint")), strict=True):
        for call in calls:
            getattr(fake, call)(child.pid, *((500,) if call == "lock" else ()))

    async def work(gpus: NodeGpus) -> None:
        await gpus.resume()

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


def test_process_that_ends_meanwhile_is_no_trouble(card):
    async def work(gpus: NodeGpus) -> None:
        await gpus.lock()
        card.children[0].kill()
        card.children[0].wait()
        await gpus.resume()

    run(card, work)
    assert "RUNNING" == card.states()[1]


def test_probe_unlocks_again(card):
    async def work(gpus: NodeGpus) -> None:
        assert [] == await gpus.probe()
        card.inject("lock 600 5")
        assert ["its GPU has been busy"] == [line[7:].partition(": ")[2][:21] for line in await gpus.probe()][:1]

    run(card, work)
    assert ["RUNNING"] * 2 == card.states()


def test_cancelled_call_kills_its_worker(card):
    """The answer of a call that nobody waits for is never taken for the next one's."""

    async def work() -> None:
        worker = CudaWorker(f"fake:{card.path}")
        assert 0 == await worker.call("state", 20, pid=card.children[0].pid)
        card.inject("state hang")
        call = asyncio.ensure_future(worker.call("state", 20, pid=card.children[0].pid))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert worker.pid is None
        await worker.call("lock", 20, pid=card.children[0].pid, timeout_ms=1)
        assert 1 == await worker.call("state", 20, pid=card.children[0].pid)
        await worker.close()

    asyncio.run(work())
