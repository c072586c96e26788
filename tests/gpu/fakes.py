"""Cases that need no card: the fake driver in the workers, everything else as it is."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from gpucr_hpc.engine.cuda import client
from tests.gpu import programs
from tests.gpu.base import Place, case, environment, passed, python, steps


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
    for inject, refused in (
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
        assert failed == refused, inject
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
