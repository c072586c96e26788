"""Cases on one card."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine import large as beside
from gpucr_hpc.engine.cuda.node import NodeGpus
from tests.gpu import programs
from tests.gpu.base import (
    PYTHON,
    ROOT,
    Place,
    case,
    environment,
    passed,
    phases,
    python,
    reference,
    refused,
    same,
    steps,
    train,
)
from tests.gpu.rig import Job


async def floor(job: Job) -> dict[str, float]:
    """Seconds of the driver's part alone, out and back, on the running job."""
    gpus = NodeGpus(job.number, job.rig.cuda)
    assert job.protected.capsule is not None
    await gpus.find(namespace_processes(job.protected.capsule.init_pid))
    await gpus.warm()
    found: dict[str, float] = {"bytes": sum(p.bytes for p in gpus.processes)}
    try:
        for name, step in (
            ("lock", gpus.lock),
            ("out", gpus.checkpoint),
            ("back", lambda: gpus.restore({})),
            ("unlock", gpus.go),
        ):
            start = time.monotonic()
            await step()
            found[name] = round(time.monotonic() - start, 3)
    finally:
        await gpus.resume()
        await gpus.close()
    return found


@case("small: runs on after a checkpoint, then moves", limit_s=150)
async def small(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    args = "--log train.log --steps 500 --gib 1 --pause 0.05"
    whole, job = await reference(place, args), place.job()
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
    same(job, whole)
    return {"stays": first, "leaves": second, "back": back}


async def _large(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    line = "--log train.log --steps 300 --pause 0.02"
    whole = await reference(place, line)
    job = place.job()
    await job.start(train(f"{line} --gib {args.gib}"), environment())
    await job.advances(by=10, limit_s=90)
    alone = [await floor(job) for _ in range(2)]
    await job.advances()
    await job.checkpoint(leave=True)
    out = phases(job)
    back = await job.restore(environment())
    await job.advances()
    await passed(job, 90)
    await passed(whole, 60)
    same(job, whole)
    durable_s = sum(seconds for name, seconds in out["phases_s"].items() if name not in ("requeue", "finish"))
    return {
        "floor": alone,
        "leaves": out,
        "back": back,
        "out_ratio": round(durable_s / statistics.mean(one["out"] for one in alone), 2),
        "back_ratio": round(back["total"] / statistics.mean(one["back"] for one in alone), 2),
    }


@case("large: same card, losses as undisturbed, times against the driver alone", limit_s=280)
async def large(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    return await _large(place, args)


@case("large: the same with memory passed on by CRIU alone", limit_s=280)
async def by_criu(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """As on machines with few processors."""
    plugin, beside.PLUGIN = beside.PLUGIN, Path("/nonexistent")
    try:
        return await _large(place, args)
    finally:
        beside.PLUGIN = plugin


@case("G2: memory of the card taken at the restore", limit_s=150)
async def taken(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    place.cuda(memory_wait_s=2.0)
    job = place.job()
    await job.start(train("--log train.log --steps 400 --gib 8 --pause 0.02"), environment())
    await job.advances(limit_s=90)
    await job.checkpoint(leave=True)
    hog = place.hog(74)
    start = time.monotonic()
    try:
        await job.restore(environment())
        why = "RESTORED"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    took_s = round(time.monotonic() - start, 1)
    assert why != "RESTORED"
    hog.kill()
    hog.wait()
    back = await job.restore(environment())
    await passed(job, 60)
    steps(job)
    return {"refused": why, "after_s": took_s, "back": back}


@case("G8: managed memory is refused, the job runs on", limit_s=100, beside=True)
async def managed(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await python(job, programs.MANAGED)
    await job.advances(limit_s=90)
    why = await refused(job)
    await job.advances()
    return {"why": why}


@case("children forked after CUDA are refused, the job runs on", limit_s=100, beside=True)
async def forked(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await python(job, programs.LOADER.replace("CONTEXT", "fork"))
    await job.advances(limit_s=90)
    why = await refused(job)
    await job.advances()
    return {"why": why}


@case("children of a fork server move with the job", limit_s=100, beside=True)
async def forkserver(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job, whole = place.job(), place.job()
    program = programs.LOADER.replace("CONTEXT", "forkserver")
    await python(job, program)
    await python(whole, program)
    await job.advances(limit_s=90)
    await job.checkpoint(leave=True)
    await job.restore(environment())
    await passed(job, 60)
    await passed(whole, 60)
    same(job, whole)
    return {}


@case("a child that begins to use the GPU late", limit_s=100, beside=True)
async def late(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await python(job, programs.LATE)
    await job.advances(limit_s=60)
    await job.checkpoint(leave=False)
    before = job.gpu_s
    (job.folder / "now").touch()
    await job.until(lambda: job.lines()[-1:] and job.lines()[-1] != "waits", 60, "the child runs")
    await job.checkpoint(leave=True)
    await job.restore(environment())
    await passed(job, 60)
    return {"gpu_s_before": before, "gpu_s": job.gpu_s}


@case("kernels longer than the lock's limit", limit_s=100, beside=True)
async def long_kernels(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await python(job, programs.LONG_KERNELS)
    await job.advances(limit_s=60)
    await job.checkpoint(leave=False)
    report = phases(job)
    await job.advances()
    return report


async def moved(place: Place, program: str, **env: str) -> dict[str, Any]:
    """Checkpoint, restore, compare with an undisturbed run of the same program."""
    job, whole = place.job(), place.job()
    await python(job, program, **env)
    await python(whole, program, **env)
    await job.advances(limit_s=90)
    await job.checkpoint(leave=True)
    out = phases(job)
    back = await job.restore(environment())
    await passed(job, 60)
    await passed(whole, 60)
    same(job, whole)
    return {"leaves": out["wall_s"], "back": back["total"], "stored": out["bytes_stored"]}


@case("CuPy", limit_s=100, beside=True)
async def cupy(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    return await moved(place, programs.CUPY)


@case("JAX", limit_s=100, beside=True)
async def jax(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """XLA chooses among algorithms by trying how long they take: two runs may differ in their last bits."""
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    return await moved(place, programs.JAX, **env)


@case("OpenMM: folding on CUDA", limit_s=120, beside=True)
async def folding(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """The wheels of OpenMM look for CUDA's libraries beside themselves; here they are where PyTorch has them."""
    where = "import nvidia.cu13 as n; print(list(n.__path__)[0])"
    found = subprocess.run([PYTHON, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    env = environment(PYTHONPATH=os.environ["PYTHONPATH"], LD_LIBRARY_PATH=f"{found}/lib")
    command = f"{PYTHON} {ROOT}/examples/folding.py 100000 CUDA >>train.log 2>>err\n"
    job, whole, again = place.job(), place.job(), place.job()
    for one in (job, whole, again):
        await one.start(command, env)
    await job.until(lambda: len(job.lines()) > 50, 90, "it has begun to fold")
    await job.checkpoint(leave=True)
    out = phases(job)
    back = await job.restore(environment())
    for one in (job, whole, again):
        await one.until(lambda one=one: one.text("train.log").find("RESULT") > 0, 60, "it ends")  # type: ignore[misc]
    assert whole.lines() == again.lines(), "two undisturbed runs differ"
    assert job.lines() == whole.lines()
    return {"leaves": out["wall_s"], "back": back["total"], "result": job.lines()[-1]}


@case("five moves of one job", limit_s=150)
async def five(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    args = "--log train.log --steps 300 --gib 0.5 --pause 0.05"
    whole, job = await reference(place, args), place.job()
    await job.start(train(args), environment())
    seconds = []
    for _ in range(5):
        await job.advances(limit_s=90)
        await job.checkpoint(leave=True)
        back = await job.restore(environment())
        seconds.append((job.report["wall_s"], back["total"]))
    await passed(job, 60)
    await passed(whole, 60)
    same(job, whole)
    return {"out_back_s": seconds}


@case("an agent that died with the GPU's memory on the host", limit_s=100)
async def settled(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """The next agent looks at the processes and brings them back."""
    from gpucr_hpc.agent import checkpointing

    job = place.job()
    await job.start(train("--log train.log --steps 600 --gib 0.5 --pause 0.02"), environment())
    await job.advances(limit_s=90)
    capsule = job.protected.capsule
    assert capsule is not None
    dead = NodeGpus(job.number, place.rig.cuda)
    await dead.find(namespace_processes(capsule.init_pid))
    await dead.lock()
    await dead.checkpoint()
    await dead.close()
    count = len(job.lines())
    await asyncio.sleep(0.5)
    assert count == len(job.lines()), "it ran on although its GPU was gone"
    start = time.monotonic()
    await checkpointing.settle(capsule, job.protected.run_dir, place.rig.cuda)
    took_s = round(time.monotonic() - start, 2)
    await job.advances()
    return {"settled_s": took_s}


@case("incremental: three checkpoints, nine tenths of the memory unchanged", limit_s=120)
async def incremental(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """As a fine-tune does it: most weights stay, few change with every step. Stored bytes, and what comes back."""
    job = place.job()
    await job.start(train("--log train.log --steps 2000 --gib 4 --width 1536 --pause 0.02"), environment())
    await job.advances(limit_s=90)
    found = []
    for _ in range(3):
        await job.advances(by=20)
        await job.checkpoint(leave=False)
        found.append(phases(job))
    await job.advances(by=20)
    await job.checkpoint(leave=True)
    found.append(phases(job))
    await job.restore(environment())
    await job.advances(by=20)
    stored = [report["bytes_stored"] for report in found]
    assert stored[1] < 0.15 * stored[0], f"stored: {stored}"
    return {"stored": stored, "share": [round(size / stored[0], 4) for size in stored], "checkpoints": found}
