"""What the cases of scripts/gpu_acceptance share. Each gets a place of its own and returns facts, or raises."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu import programs
from tests.gpu.rig import Job, Rig

ROOT = Path(__file__).resolve().parents[2]
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV", "CUDA_HOME")
_KEPT_PREFIXES = ("NCCL_", "TORCH_", "NVSHMEM_")
#: The capsule has a /tmp of its own.
PYTHON = "/usr/bin/python3" if sys.executable.startswith("/tmp/") else sys.executable
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
#: What --checkpoint-nccl=safe sets.
SAFE = {**SOCKETS, "NCCL_NVLS_ENABLE": "0"}

Work = Callable[["Place", argparse.Namespace], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """gpus: cards that it needs. beside: may run at the same time as others of that kind."""

    gpus: int
    limit_s: float
    beside: bool
    work: Work


CASES: dict[str, Case] = {}
_numbers = itertools.count(100)


def case(name: str, *, gpus: int = 1, limit_s: float = 120.0, beside: bool = False) -> Callable[[Work], Work]:
    """Register a case under a name."""

    def register(work: Work) -> Work:
        CASES[name] = Case(gpus, limit_s, beside, work)
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

    def job(self) -> Job:
        job = Job(self.rig, next(_numbers))
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


def same(job: Job, whole: Job, name: str = "train.log") -> None:
    """The job's values are those of the undisturbed run."""
    mine, theirs = steps(job, name), steps(whole, name)
    differ = [step for step, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other]
    assert not differ, f"{len(differ)} of {len(mine)} values differ from an undisturbed run's, from step {differ[0]} on"
    assert len(mine) == len(theirs), f"{len(mine)} steps, {len(theirs)} undisturbed"


async def reference(place: Place, args: str, **env: str) -> Job:
    """An undisturbed run of the same training: a job like the other, but left alone."""
    job = place.job()
    await job.start(train(args), environment(**env))
    return job


def phases(job: Job) -> dict[str, Any]:
    """Seconds and bytes of the last checkpoint."""
    wanted = ("wall_s", "phases_s", "bytes_plain", "bytes_stored")
    return {k: v for k, v in job.report.items() if k in wanted} | {"gpu_s": job.gpu_s}


async def refused(job: Job, *, leave: bool = False, limit_s: float = 600.0) -> str:
    """A checkpoint that must not come about; its reason. The job runs on, by the caller's check."""
    try:
        await job.checkpoint(leave=leave, limit_s=limit_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the checkpoint was taken")
