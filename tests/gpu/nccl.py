"""NCCL at full speed, with the real library: communicators torn down before a checkpoint and made again after it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine.nccl.cut import Cut
from gpucr_hpc.engine.nccl.node import NodeRanks, covered
from tests.gpu import programs
from tests.gpu.base import (
    PYTHON,
    ROOT,
    Place,
    case,
    environment,
    gpu_count,
    passed,
    phases,
    python,
    refused,
    steps,
)
from tests.gpu.fakes import fake
from tests.gpu.rig import INTERPOSER, Job

UNDER = {"LD_PRELOAD": str(INTERPOSER)}
_BENCH = Path(os.environ.get("GPUCR_NCCL_BENCH", "/opt/gpucr-tools/bin/nccl-bench"))


def ranks(program: str, count: int, port: int, **variables: str) -> str:
    """A script that starts ranks; {rank} in the program's line and in a variable's value is the rank's number."""
    lines = [
        " ".join(
            [
                *(f"{name}={value.format(rank=rank)}" for name, value in {"LOCAL_RANK": "{rank}", **variables}.items()),
                f"RANK={rank} WORLD_SIZE={count} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}",
                f"{program.format(rank=rank)} >>out-{rank} 2>>err &",
            ]
        )
        for rank in range(count)
    ]
    return "\n".join([*lines, "wait\n"])


def _train(args: str) -> str:
    return f"{PYTHON} {ROOT}/examples/pytorch_train.py --log train-{{rank}}.log {args}"


def _logs(count: int) -> list[str]:
    return [f"train-{rank}.log" for rank in range(count)]


async def _advance(job: Job, logs: list[str], *, by: int = 3, limit_s: float = 90.0) -> None:
    await asyncio.gather(*(job.advances(name, by=by, limit_s=limit_s) for name in logs))


def _gpu_memory(pid: int) -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line.partition(",")[2].strip() for line in lines if line.split(",")[0] == str(pid)), "")


def _state(pid: int) -> dict[str, Any]:
    """What a process holds of NCCL's and of the card."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = [line.split(None, 5)[5] for line in lines if "/" in line]
    threads, targets = [], []
    for number in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            threads.append(Path(f"/proc/{pid}/task/{number}/comm").read_text().strip())
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {
        "gpu_memory": _gpu_memory(pid),
        "shared": sorted({path for path in mapped if re.search(r"/dev/shm/|memfd", path)}),
        "threads": dict(Counter(name for name in threads if "nccl" in name.lower())),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


async def cut_alone(job: Job) -> dict[str, Any]:
    """A cut without a checkpoint, on the running job: seconds of each part, and what is left of NCCL in between."""
    assert job.protected.capsule is not None
    nodes = await NodeRanks.connect(namespace_processes(job.protected.capsule.init_pid), job.protected.uid)
    pid = nodes.links[0].pid
    try:
        cut = Cut(job.number, [nodes])
        reports = await cut.ask()
        found: dict[str, Any] = {
            "communicators": [len(report.communicators) for report in reports],
            "operations": [sum(c.collectives for c in report.communicators) for report in reports],
            "before": _state(pid),
        }
        times = [time.monotonic()]
        await cut.take(15)
        times.append(time.monotonic())
        await cut.tear_down(30)
        times.append(time.monotonic())
        await nodes.verify()
        found["gone"] = _state(pid)
        times.append(time.monotonic())
        await cut.bring_back(60)
        times.append(time.monotonic())
        found["back"] = _state(pid)
        names = ("cut_s", "torn_down_s", "", "made_again_s")
        found |= {name: round(b - a, 4) for name, a, b in zip(names, times, times[1:], strict=False) if name}
    finally:
        await nodes.close()
    assert min(found["communicators"]) > 0, "NCCL is not under the interposer"
    return found


async def _rounds(job: Job, logs: list[str], count: int, cards: Mapping[int, dict[str, str]]) -> dict[str, Any]:
    """Moves, and a checkpoint after which it goes on before the first; seconds of each. cards: environment of a round's
    restore, if not the usual one."""
    await job.checkpoint(leave=False)
    stays = phases(job)
    assert {"quiesce", "give_back"} <= set(stays["phases_s"])
    await _advance(job, logs, by=4)
    moves = []
    for number in range(count):
        await job.checkpoint(leave=True)
        assert "quiesce" in job.report["phases_s"]
        back = await job.restore(environment(**cards.get(number, {})))
        moves.append(
            {
                "out_s": job.report["wall_s"],
                "quiesce_s": job.report["phases_s"]["quiesce"],
                "back_s": back["total"],
                "nccl_s": back["nccl"],
            }
        )
        await _advance(job, logs, by=4)
    return {"stays": stays, "moves": moves}


async def _same(job: Job, whole: Job, logs: list[str], limit_s: float = 90.0) -> None:
    for name in logs:
        await passed(job, limit_s, name)
        await passed(whole, limit_s, name)
        assert steps(job, name) == steps(whole, name), f"{name}: the values differ from an undisturbed run"


@case("fake: NCCL made again, two ranks", gpus=0, limit_s=120)
async def fake_ranks(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """Random programs on the fake NCCL and the fake driver, over the same path as the real ones."""
    build = ROOT / "spank_plugin/build/nccl"
    fake(place)
    whole, job, logs = place.job(), place.job(), ["out-0", "out-1"]
    for one, more in ((whole, {}), (job, UNDER)):
        for path in (build / "fake/program", build / "fake/lib/libnccl.so.2", build / "fake/lib/libcuda.so.1"):
            shutil.copy(path, one.folder)
        line = f"GPUCR_FAKE_GPU={one.number}-{{rank}} exec ./program . {{rank}} 2 1 1000000 20 1"
        await one.start(ranks(line, 2, 0), environment(LD_LIBRARY_PATH=".", **more))
    await _advance(job, logs, by=2)
    alone = await cut_alone(job)
    found = await _rounds(job, logs, 2, {})
    for name in logs:
        count = min(len(job.lines(name)), len(whole.lines(name))) - 1
        assert count > 10
        assert job.lines(name)[:count] == whole.lines(name)[:count], f"{name}: not the values of an undisturbed run"
    return {"alone": alone, **found}


# --- one card -------------------------------------------------------------------------------------------


@case("NCCL made again: one rank, several communicators", limit_s=150)
async def one_rank(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """Groups split off, made and destroyed on the way; the undisturbed run is without the interposer."""
    whole, job = place.job(), place.job()
    await python(whole, programs.NCCL_GROUPS)
    await python(job, programs.NCCL_GROUPS, **UNDER)
    await job.advances(by=10, limit_s=90)
    alone = await cut_alone(job)
    await job.advances(by=10)
    found = await _rounds(job, ["train.log"], 2, {})
    await _same(job, whole, ["train.log"])
    return {"alone": alone, **found}


def _nccl_folder() -> str:
    """Where the library of Python's wheel is."""
    where = "import nvidia.nccl as n; print(list(n.__path__)[0])"
    return subprocess.run([PYTHON, "-c", where], capture_output=True, text=True, check=True).stdout.strip() + "/lib"


@case("NCCL made again: CuPy", limit_s=120)
async def cupy(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    env = {"LD_LIBRARY_PATH": f"{_nccl_folder()}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    whole, job = place.job(), place.job()
    await python(whole, programs.NCCL_CUPY, **env)
    await python(job, programs.NCCL_CUPY, **env, **UNDER)
    await job.advances(by=10, limit_s=90)
    alone = await cut_alone(job)
    await job.advances()
    found = await _rounds(job, ["train.log"], 1, {})
    await _same(job, whole, ["train.log"])
    return {"alone": alone, **found}


@case("NCCL made again: two ranks on one card", limit_s=240)
async def two_on_one(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """NCCL takes them for ranks of two hosts and goes over sockets: a cut over several ranks. A checkpoint is refused:
    after one the first kernel of NCCL failed (docs/nccl.md)."""
    line = _train("--steps 200 --pause 0.05 --width 512")
    whole, job, logs = place.job(), place.job(), _logs(2)
    hosts = {"LOCAL_RANK": "0", "NCCL_HOSTID": "gpucr-{rank}", "NCCL_IB_DISABLE": "1"}
    await whole.start(ranks(line, 2, 29521, **hosts), environment())
    await job.start(ranks(line, 2, 29521, **hosts), environment(**UNDER))
    await _advance(job, logs, by=10)
    alone = await cut_alone(job)
    await _advance(job, logs)
    found = await refused(job)
    assert "share a card" in found, found
    await _same(job, whole, logs)
    return {"alone": alone, "refused": found}


@case("NCCL made again: CUDA graphs and tensors shared by the program are named", limit_s=150)
async def named(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """A graph that holds NCCL's operations, a tensor for another process; and graphs without NCCL, captured all the
    time, are no harm to a checkpoint, nor it to them."""
    found: dict[str, Any] = {}
    for way in ("graph", "tensor", "captures"):
        job = place.job()
        await python(job, programs.NCCL_WAYS.replace("WAY", way), **UNDER)
        await job.advances(by=10, limit_s=90)
        assert job.protected.capsule is not None
        processes = namespace_processes(job.protected.capsule.init_pid)
        [helper] = (await covered(processes, job.protected.uid)).values()
        found[way] = {"why": helper.why, "shares": helper.shares}
        if way == "tensor":
            found[way]["refused"] = await refused(job)
        if way == "captures":
            await job.checkpoint(leave=False)
            found[way]["seconds"] = job.report["phases_s"]
        await job.advances(by=10)
        await job.end()
    assert "CUDA graph" in found["graph"]["why"], found
    assert "cudaIpcGetMemHandle" in found["tensor"]["shares"], found
    assert found["tensor"]["shares"] in found["tensor"]["refused"], found
    assert found["captures"]["why"] + found["captures"]["shares"] == "", found
    return found


@case("NCCL: cost of a call under the interposer, real library", limit_s=120)
async def call_cost(_place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """CPU nanoseconds of an operation on nothing, which NCCL itself ends early: with and without in turn, medians."""
    env = environment(GPUCR_NCCL_DIR="/tmp")
    env["LD_LIBRARY_PATH"] = f"{_nccl_folder()}:{env.get('LD_LIBRARY_PATH', '')}"
    plain, under = [], []
    for _ in range(7):
        for values, more in ((plain, {}), (under, UNDER)):
            command = [str(_BENCH), "500000"]
            done = await asyncio.to_thread(
                subprocess.run, command, env={**env, **more}, capture_output=True, text=True, check=False
            )
            said = f"{done.stdout[-300:]} {done.stderr[-300:]}"
            assert done.returncode == 0, f"{_BENCH}: status {done.returncode}: {said}"
            values.append(float(done.stdout.split()[-1]))
    added = sorted(b - a for a, b in zip(plain, under, strict=True))
    return {
        "without_ns": statistics.median(plain),
        "with_ns": statistics.median(under),
        "added_ns": round(statistics.median(added), 2),
        "quartiles_ns": [round(added[1], 2), round(added[-2], 2)],
    }


# --- two cards and more ---------------------------------------------------------------------------------


@case("NCCL made again: DDP, moved again and again", gpus=2, limit_s=330)
async def ddp(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """All cards of the machine, NCCL as it comes (NVLink)."""
    cards = gpu_count()
    line, logs = _train(f"--steps {200 + 40 * args.rounds} --pause 0.05"), _logs(cards)
    whole, job = place.job(), place.job()
    await whole.start(ranks(line, cards, 29522), environment())
    await job.start(ranks(line, cards, 29522), environment(**UNDER))
    await _advance(job, logs, by=10)
    alone = await cut_alone(job)
    await _advance(job, logs)
    found = await _rounds(job, logs, args.rounds, {})
    await _same(job, whole, logs)
    return {"cards": cards, "alone": alone, **found}


@case("NCCL made again: the cards exchanged at each move", gpus=2, limit_s=240)
async def exchanged(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    count, cards = min(args.rounds, 3), gpu_count()
    line, logs = _train(f"--steps {150 + 50 * count} --pause 0.05"), _logs(cards)
    order = [",".join(str((rank + shift) % cards) for rank in range(cards)) for shift in (0, 1)]
    whole, job = place.job(), place.job()
    await whole.start(ranks(line, cards, 29523), environment(CUDA_VISIBLE_DEVICES=order[0]))
    await job.start(ranks(line, cards, 29523), environment(CUDA_VISIBLE_DEVICES=order[0], **UNDER))
    await _advance(job, logs, by=10)
    turns = {number: {"CUDA_VISIBLE_DEVICES": order[(number + 1) % 2]} for number in range(count)}
    found = await _rounds(job, logs, count, turns)
    await _same(job, whole, logs)
    return {"cards": cards, **found}


@case("NCCL made again: FSDP", gpus=2, limit_s=300)
async def fsdp(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    count, cards = min(args.rounds, 10), gpu_count()
    logs, whole, job = _logs(cards), place.job(), place.job()
    for one in (whole, job):
        (one.folder / "program.py").write_text(programs.FSDP)
    line = f"{PYTHON} program.py {200 + 40 * count}"
    await whole.start(ranks(line, cards, 29524), environment())
    await job.start(ranks(line, cards, 29524), environment(**UNDER))
    await _advance(job, logs, by=10)
    found = await _rounds(job, logs, count, {})
    await _same(job, whole, logs)
    return {"cards": cards, **found}


@case("NCCL made again: a checkpoint every 20 s for 3 minutes", gpus=2, limit_s=300)
async def periodic(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    cards = gpu_count()
    line, logs = _train("--steps 2500 --pause 0.05"), _logs(cards)
    whole, job = place.job(), place.job()
    await whole.start(ranks(line, cards, 29525), environment())
    await job.start(ranks(line, cards, 29525), environment(**UNDER))
    await _advance(job, logs, by=10)
    seconds, start = [], time.monotonic()
    for number in range(9):
        await asyncio.sleep(max(0.0, start + 20 * (number + 1) - time.monotonic()))
        await job.checkpoint(leave=False)
        took = job.report["phases_s"]
        seconds.append({"quiesce": took["quiesce"], "give_back": took["give_back"], "wall": job.report["wall_s"]})
        await _advance(job, logs)
    await _same(job, whole, logs, 150)
    return {"cards": cards, "checkpoints": seconds}


@case("NCCL made again: all-reduce before and after", gpus=2, limit_s=240)
async def bandwidth(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """GB/s on the bus for 1 GiB, medians of 20: without the interposer, under it, and after a move. One after another,
    each alone on the cards."""
    cards, found = gpu_count(), {}

    async def figures(job: Job, count: int) -> float:
        start = len(job.lines("bandwidth"))
        await job.until(lambda: len(job.lines("bandwidth")) >= start + count, 90, "it has its figures")
        return statistics.median(float(line) for line in job.lines("bandwidth")[start : start + count])

    for name, env in (("as it comes", {}), ("under the interposer", UNDER), ("as it comes, again", {})):
        job = place.job()
        (job.folder / "program.py").write_text(programs.BANDWIDTH)
        await job.start(ranks(f"{PYTHON} program.py", cards, 29526), environment(**env))
        await job.until(lambda job=job: len(job.lines("bandwidth")) >= 3, 90, f"{name} runs")  # type: ignore[misc]
        found[name] = await figures(job, 20)
        if env:
            await job.checkpoint(leave=True)
            await job.restore(environment())
            await job.until(lambda job=job: job.lines("bandwidth"), 60, "it runs again")  # type: ignore[misc]
            await figures(job, 3)
            found["after a move"] = await figures(job, 20)
        await job.end()
    base = statistics.mean([found["as it comes"], found["as it comes, again"]])
    return {"cards": cards, "GB/s": found, "ratios": {k: round(v / base, 4) for k, v in found.items()}}


@case("NCCL made again: time of a DDP step before and after", gpus=2, limit_s=240)
async def step_time(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a training step, medians of 12 bursts of 20: without the interposer and under it in turn, then
    under it after a move, and without again."""
    cards = gpu_count()
    plain, under = place.job(), place.job()
    for number, (job, env) in enumerate(((plain, {}), (under, UNDER))):
        (job.folder / "program.py").write_text(programs.DDP_BURSTS)
        await job.start(ranks(f"{PYTHON} program.py", cards, 29527 + number), environment(**env))
        await job.until(lambda job=job: job.lines("ready"), 90, "it is ready")  # type: ignore[misc]

    async def burst(job: Job) -> float:
        count = len(job.lines("bursts"))
        (job.folder / "turn").write_text(str(count))
        await job.until(lambda: len(job.lines("bursts")) > count, 60, "a burst ends")
        return float(job.lines("bursts")[-1])

    times: dict[str, list[float]] = {name: [] for name in ("as it comes", "under the interposer", "again as it comes")}
    moved: dict[str, list[float]] = {name: [] for name in ("as it comes", "after a move", "again as it comes")}
    for found, middle in ((times, "under the interposer"), (moved, "after a move")):
        await burst(plain), await burst(under)
        for _ in range(12):
            found["as it comes"].append(await burst(plain))
            found[middle].append(await burst(under))
            found["again as it comes"].append(await burst(plain))
        if found is times:
            await under.checkpoint(leave=True)
            await under.restore(environment())
    medians = {name: statistics.median(values) for name, values in times.items()}
    after = {name: statistics.median(values) for name, values in moved.items()}
    return {
        "cards": cards,
        "ms": {name: round(value, 3) for name, value in medians.items()},
        "ms_after": {name: round(value, 3) for name, value in after.items()},
        "speed": {name: round(medians["as it comes"] / value, 4) for name, value in medians.items()},
        "speed_after": {name: round(after["as it comes"] / value, 4) for name, value in after.items()},
    }
