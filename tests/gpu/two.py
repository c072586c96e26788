"""Cases on two cards of one machine."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.client import CudaWorker
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.errors import CutNotPossible, GpucrError
from tests.gpu.base import (
    PYTHON,
    ROOT,
    SOCKETS,
    Place,
    case,
    environment,
    passed,
    phases,
    reference,
    refused,
    same,
    steps,
    train,
)
from tests.gpu.rig import Job
from tests.gpu.single import floor, moved

_RANKS = """
for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \\
        {python} {root}/examples/pytorch_train.py --log train-$rank.log {args} >>out-$rank 2>>err &
done
wait
"""
_LOGS = ("train-0.log", "train-1.log")


def ranks(args: str) -> str:
    return _RANKS.format(python=PYTHON, root=ROOT, args=args)


async def both_advance(job: Job, limit_s: float = 60.0, by: int = 3) -> None:
    await asyncio.gather(*(job.advances(name, limit_s=limit_s, by=by) for name in _LOGS))


@case("large: moved to the other card", gpus=2, limit_s=200)
async def other_card(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    line = "--log train.log --steps 300 --pause 0.02"
    whole, job = await reference(place, line, CUDA_VISIBLE_DEVICES="1"), place.job()
    await job.start(train(f"{line} --gib {args.gib}"), environment(CUDA_VISIBLE_DEVICES="0"))
    await job.advances(by=10, limit_s=90)
    (pid,) = job.pids()
    cards, alone = procfs.cards(pid), await floor(job)
    await job.checkpoint(leave=True)
    out = phases(job)
    back = await job.restore(environment(CUDA_VISIBLE_DEVICES="1"))
    (pid,) = job.pids()
    on = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_gpu_memory", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
    second = re.search(r"GPU-[0-9a-f-]+", listed[1])
    assert second
    assert any(str(pid) in line and second[0] in line for line in on), f"not on the other card: {on}"
    await passed(job, 90)
    await passed(whole, 60)
    same(job, whole)
    return {"cards_seen": cards, "floor": alone, "leaves": out, "back": back}


def _signs(pid: int) -> dict[str, Any]:
    """What might tell NCCL's transports of a process."""
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    targets = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            continue
    inodes = {t[8:-1] for t in targets if t.startswith("socket:[")}
    unix = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    kinds = Counter(re.sub(r"\d+", "N", t) for t in targets)
    return {
        "shm": sorted({line.split()[-1] for line in mapped if "/dev/shm" in line})[:5],
        "uvm": [line.split()[0] for line in mapped if "nvidia-uvm" in line][:6],
        "devices": len([line for line in mapped if "/dev/nvidia" in line]),
        "fds": dict(kinds),
        "unix": [u[7] for u in unix if len(u) > 7 and u[6] in inodes][:6],
        "threads": dict(
            Counter(Path(f"/proc/{pid}/task/{t}/comm").read_text().strip() for t in os.listdir(f"/proc/{pid}/task"))
        ),
        "cards": procfs.cards(pid),
    }


@case("NCCL as it comes is refused, the job runs on", gpus=2, limit_s=120, beside=True)
async def default_nccl(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await job.start(ranks("--steps 2000 --pause 0.02"), environment())
    await both_advance(job, 90)
    signs = _signs(job.pids()[0])
    start = time.monotonic()
    why = await refused(job)
    took_s = round(time.monotonic() - start, 2)
    await both_advance(job)
    return {"why": why, "after_s": took_s, "signs": signs}


@case("two independent processes with libnccl on two cards", gpus=2, limit_s=120, beside=True)
async def independent(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """No communicator between them: what the preflight says of them."""
    job = place.job()
    lines = "".join(
        f"CUDA_VISIBLE_DEVICES={card} {PYTHON} {ROOT}/examples/pytorch_train.py --log train-{card}.log --steps 2000 "
        "--pause 0.02 >>out 2>>err &\n"
        for card in (0, 1)
    )
    await job.start(lines + "wait\n", environment())
    await both_advance(job, 90)
    signs = _signs(job.pids()[0])
    try:
        await job.checkpoint(leave=True)
    except Exception as error:
        return {"refused": str(error), "signs": signs}
    await job.restore(environment())
    await both_advance(job)
    return {"signs": signs, "leaves": phases(job)}


@case("two ranks, NCCL over sockets: moved again and again", gpus=2, limit_s=330)
async def moves(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    line = f"--steps {100 + 30 * args.rounds} --pause 0.05"
    whole, job = place.job(), place.job()
    await whole.start(ranks(line), environment(**SOCKETS))
    await job.start(ranks(line), environment(**SOCKETS))
    await both_advance(job, 90)
    signs = _signs(job.pids()[0])
    seconds = []
    for _ in range(args.rounds):
        await job.checkpoint(leave=True)
        back = await job.restore(environment())
        seconds.append((job.report["wall_s"], back["total"]))
        await both_advance(job, by=4)
    last = phases(job)
    for name in _LOGS:
        await passed(job, 60, name)
        await passed(whole, 60, name)
        assert steps(job, name) == steps(whole, name), f"{name}: the losses differ from an undisturbed run"
    return {"out_back_s": seconds, "last": last, "signs": signs}


@case("G4: a lock in the middle of collectives, 20 times", gpus=2, limit_s=150)
async def collectives(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    job = place.job()
    await job.start(ranks("--steps 100000 --width 2048"), environment(**SOCKETS))
    await both_advance(job, 90)
    assert job.protected.capsule is not None
    tries = []
    for _ in range(20):
        gpus = NodeGpus(job.number, job.rig.cuda)
        await gpus.find(namespace_processes(job.protected.capsule.init_pid))
        await gpus.warm()
        count = 0
        while True:
            count += 1
            try:
                await gpus.lock()
                break
            except CutNotPossible:
                assert count < 30
                await asyncio.sleep(0.05 + 0.3 * (count % 3))
        tries.append(count)
        await gpus.unlock()
        await gpus.close()
        await both_advance(job, by=1)
    return {"tries": tries}


_PEER = """
import sys, torch
x = torch.randint(0, 1 << 62, (1 << 24,), device="cuda:0")
y = x.to("cuda:1")
s = (x.sum().item(), y.sum().item())
print("ready", flush=True)
sys.stdin.readline()
y.copy_(x + 1)
print("same" if (x.sum().item(), (y - 1).sum().item()) == s else "CHANGED", flush=True)
"""


@case("one process that uses both cards", gpus=2, limit_s=90, beside=True)
async def peer(_place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """The driver alone, without CRIU: is what it takes out also brought back?"""
    driver = CudaWorker("ctypes")
    child = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    found: dict[str, Any] = {}
    try:
        await asyncio.to_thread(child.stdout.readline)
        found["signs"] = _signs(child.pid)
        steps_of: tuple[tuple[str, dict[str, Any]], ...] = (
            ("lock", {"timeout_ms": 2000}),
            ("checkpoint", {}),
            ("restore", {"gpus": {}}),
            ("unlock", {}),
            ("state", {}),
        )
        for name, fields in steps_of:
            try:
                found[name] = await driver.call(name, 30.0, pid=child.pid, **fields)
            except GpucrError as error:
                found[name] = str(error)
        said, _ = await asyncio.to_thread(child.communicate, "\n", 30)
        found["memory"] = said.strip()
    finally:
        await driver.close()
        child.kill()
        child.wait()
    return found


_TWO_CARDS = """
import time, torch
torch.use_deterministic_algorithms(True)
x = torch.arange(1 << 24, device="cuda:0", dtype=torch.float64)
log = open("train.log", "a", buffering=1)
for step in range(300):
    y = torch.sqrt(x * x + 1).to("cuda:1")
    x = (y + torch.ones_like(y)).to("cuda:0")
    log.write(f"{step} {x.sum().item().hex()}\\n")
    time.sleep(0.03)
log.write("passed\\n")
"""


@case("one process on both cards, peer access: moved", gpus=2, limit_s=120, beside=True)
async def two_cards(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """Data goes from card to card, by NVLink where there is one."""
    return await moved(place, _TWO_CARDS)
