"""Cases that need no card: the fake driver in the workers, everything else as it is."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpucr_hpc.engine import large
from gpucr_hpc.engine.cuda import client
from gpucr_hpc.engine.cuda.fake import FakeDriver
from gpucr_hpc.engine.worker_client import WorkerClient
from tests.gpu import programs
from tests.gpu.base import Place, case, environment, passed, python, refused, steps
from tests.gpu.failures import patched
from tests.gpu.rig import Job


def fake(place: Place, inject: str = "") -> Path:
    """Let the workers load the fake driver; its directory."""
    directory = place.base / "driver"
    directory.mkdir(exist_ok=True)
    if inject:
        (directory / "inject").write_text(inject)
    os.environ[client.FAKE_VARIABLE] = str(directory)
    return directory


@case("fake: leave running, move, and every injected failure", gpus=0, limit_s=120)
async def fake_all(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    directory = fake(place)
    place.cuda(copy_limit_s=2.0)
    job = place.job()
    await python(job, programs.FAKE.replace("STEPS", "2000"), GPUCR_FAKE_GPU="a")
    await job.advances()
    await job.checkpoint(leave=False)
    await job.advances()
    for inject, fails in (
        ("lock 600 2\n", False),
        ("checkpoint hang\n", True),
        ("checkpoint die\n", True),
        ("checkpoint 999\n", True),
        ("lock die\n", True),
    ):
        (directory / "inject").write_text(inject)
        try:
            await job.checkpoint(leave=False)
            failed = False
        except Exception as error:
            print("     ", inject.strip(), "->", error)
            failed = True
        assert failed == fails, inject
        await job.advances()
        assert (directory / "state-a").read_text() == "RUNNING", inject
    await job.checkpoint(leave=True)
    assert (directory / "state-a").read_text() == "CHECKPOINTED"
    await job.restore(environment())
    await passed(job, 60)
    steps(job)
    return {"journal": len((directory / "journal").read_text().splitlines())}


@case("fake: only the driver's thread runs until GPU memory is back", gpus=0, limit_s=60)
async def fake_threads(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """A checkpoint that lets the job run on, and a restore, each with a driver that takes its time."""
    directory = fake(place)
    job = place.job()
    await python(job, programs.FAKE.replace("STEPS", "500"), GPUCR_FAKE_GPU="t")
    await job.advances()
    seen = []
    for leave in (False, True):
        before = len(job.lines("driver.log"))
        (directory / "inject").write_text("restore slow\n")
        work = asyncio.ensure_future(job.checkpoint(leave=leave))
        if leave:
            await work
            before = len(job.lines("driver.log"))
            work = asyncio.ensure_future(job.restore(environment()))
        counts = []
        while not work.done():
            counts.append((len(job.lines()), len(job.lines("driver.log"))))
            await asyncio.sleep(0.05)
        await work
        alone = max(sum(1 for main, driver in counts if main == m and driver > before) for m, _ in counts)
        seen.append(alone)
        assert alone > 10, f"the main thread ran: {counts}"
        await job.advances()
    await passed(job, 30)
    steps(job)
    return {"samples_alone": seen}


@case("fake: memory is sealed while the driver copies, and every injected failure", gpus=0, limit_s=200)
async def fake_copies(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """A card with much memory in use, on a machine with processors for it: what breaks is tried again, and the job is
    moved with the memory that it had."""
    directory = fake(place)
    place.cuda(copy_limit_s=6.0, stop_threads=False)  # a thread of Python cannot run while another holds its lock
    job = place.job()
    await python(job, programs.FAKE_COPY.replace("MIB", str(_COPY_MIB)), GPUCR_FAKE_GPU="c", GPUCR_FAKE_COPY="1")
    await job.advances()
    with _much(directory, job) as early:
        (directory / "inject").write_text("checkpoint 999\n")
        assert "999" in await refused(job)
        await job.advances()
        assert early.bytes == 0, "a job that goes on is sealed when it runs"
        moves = ("checkpoint hang", "checkpoint die", "checkpoint 999", "", "restore slow")
        for number, inject in enumerate(moves, 1):
            (directory / "inject").write_text(inject)
            before = early.bytes
            await job.checkpoint(leave=True)
            assert early.bytes > before, f"{inject!r}: nothing was sealed early"
            await job.restore(environment())
            _known(directory, job)
            assert job.lines("contents") == ["same"] * number
            await job.advances()
    (job.folder / "stop").touch()
    await passed(job, 20)
    steps(job)
    return {"moves": len(moves), "sealed_early_mib": early.bytes >> 20}


_COPY_MIB = 384


class _Early:
    """Bytes that were ordered to be sealed early."""

    bytes = 0


@contextmanager
def _much(directory: Path, job: Job) -> Iterator[_Early]:
    """Whatever this machine has: the fake's memory is much, and sealed early."""
    seen, kept = _Early(), WorkerClient.call

    async def call(self: WorkerClient, verb: str, fds: Sequence[int] = (), **fields: Any) -> Any:
        if verb == "early":
            seen.bytes += sum(end - begin for begin, end in fields["ranges"])
        return await kept(self, verb, fds, **fields)

    _known(directory, job)
    with patched(WorkerClient, "call", call), patched(large, "PROCESSORS", 1), patched(large, "LARGE_BYTES", 128 << 20):
        yield seen


def _known(directory: Path, job: Job) -> None:
    """The card says that the job's process uses so much of it."""
    table = FakeDriver(str(directory)).inventory().as_dict()
    table["used"] = {str(pid): _COPY_MIB << 20 for pid in job.pids()}
    (directory / "gpus.json").write_text(json.dumps(table))
