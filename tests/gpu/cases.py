"""The cases of scripts/gpu_acceptance. Each gets a place of its own and returns facts, or raises."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import client
from tests.gpu import programs
from tests.gpu.rig import Job, Rig

ROOT = Path(__file__).resolve().parents[2]
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV", "CUDA_HOME")
_KEPT_PREFIXES = ("NCCL_", "TORCH_", "NVSHMEM_")
#: The capsule has a /tmp of its own.
PYTHON = "/usr/bin/python3" if sys.executable.startswith("/tmp/") else sys.executable
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

Work = Callable[["Place", argparse.Namespace], Awaitable[dict[str, Any]]]
CASES: dict[str, tuple[int, float, Work]] = {}


def case(name: str, *, gpus: int = 1, limit_s: float = 120.0) -> Callable[[Work], Work]:
    """Register a case: how many cards it needs and how long it may take."""

    def register(work: Work) -> Work:
        CASES[name] = (gpus, limit_s, work)
        return work

    return register


def gpu_count() -> int:
    if not shutil.which("nvidia-smi"):
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines())


class Place:
    """Folders, jobs and helpers of one case; `close` leaves nothing behind."""

    def __init__(self, base: Path, criu: str, name: str) -> None:
        self.base = base / name.replace(" ", "-").replace(",", "")
        self.rig = Rig(self.base, criu=criu)
        self.jobs: list[Job] = []
        self.children: list[subprocess.Popen[str]] = []

    def job(self, number: int) -> Job:
        job = Job(self.rig, number)
        self.jobs.append(job)
        return job

    def cuda(self, **fields: Any) -> None:
        self.rig.cuda = replace(self.rig.cuda, **fields)

    def hog(self, gib: float) -> subprocess.Popen[str]:
        """Somebody else's program that holds GPU memory."""
        child = subprocess.Popen(
            [sys.executable, "-c", programs.HOG, str(gib)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "holds"
        return child

    async def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        for job in self.jobs:
            await job.end()
        self.rig.close()
        shutil.rmtree(self.rig.store, ignore_errors=True)


def environment(**more: str) -> dict[str, str]:
    """What a job's script gets of ours."""
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    return {**kept, **more}


def train(args: str) -> str:
    return programs.TRAIN.format(python=PYTHON, root=ROOT, args=args)


async def python(job: Job, program: str, **env: str) -> None:
    """Start a job that runs a program text."""
    (job.folder / "program.py").write_text(program)
    await job.start(f"exec {PYTHON} program.py >>out 2>>err\n", environment(**env))


async def passed(job: Job, limit_s: float, name: str = "train.log") -> None:
    await job.until(lambda: job.lines(name)[-1:] in (["passed"], ["failed"]), limit_s, f"{name} ends")
    assert job.lines(name)[-1] == "passed", f"{name}: {job.lines(name)[-1]}: {job.text('err')[-800:]}"


def steps(job: Job, name: str = "train.log") -> list[str]:
    """The log without the last word; no step may be there twice or be missing."""
    lines = [line for line in job.lines(name) if line not in ("passed", "failed")]
    numbers = [int(line.split()[0]) for line in lines]
    assert numbers == list(range(len(numbers))), f"steps are not in order: {numbers[:5]}...{numbers[-5:]}"
    return lines


# --- without a card -------------------------------------------------------------------------------------------------


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
    job = place.job(101)
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


# --- one card -------------------------------------------------------------------------------------------------------

async def reference(place: Place, args: str, number: int, **env: str) -> Job:
    """An undisturbed run of the same training, outside of any capsule's way: it is a job like the other."""
    job = place.job(number)
    await job.start(train(args), environment(**env))
    return job


def phases(job: Job) -> dict[str, Any]:
    """Seconds and bytes of the last checkpoint."""
    wanted = ("wall_s", "phases_s", "bytes_plain", "bytes_stored")
    return {k: v for k, v in job.report.items() if k in wanted}


@case("one card, small: runs on after a checkpoint, then moves", limit_s=150)
async def small(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    args = "--log train.log --steps 500 --gib 1 --pause 0.05"
    whole = await reference(place, args, 200)
    job = place.job(201)
    await job.start(train(args), environment())
    await job.advances(limit_s=90)
    await job.checkpoint(leave=False)
    first = phases(job)
    await job.advances()
    await job.checkpoint(leave=True)
    second = phases(job)
    back = await job.restore(environment())
    await job.advances()
    await passed(job, 60)
    await passed(whole, 60)
    assert steps(job) == steps(whole), "the losses differ from an undisturbed run"
    return {"stays": first, "leaves": second, "back": back}
