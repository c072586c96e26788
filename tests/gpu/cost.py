"""What protection costs between checkpoints: training steps inside and outside a capsule, all-reduce by NCCL's ways."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
from pathlib import Path
from typing import IO, Any

from tests.gpu import programs
from tests.gpu.base import PYTHON, SAFE, Place, case, environment
from tests.gpu.rig import USER

_ROUNDS = 12
#: rows, width, depth, steps: work that fills the card, and work that is bound by the launches of small kernels.
_SIZES = {"large kernels": "8192 4096 4 40", "small kernels": "16 64 8 150"}


class _Runner:
    """A training program in a folder that does a burst of steps when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "program.py").write_text(programs.BURSTS)
        os.mkfifo(folder / "turns")
        for path in (folder / "program.py", folder / "turns"):
            os.chown(path, USER, USER)
        self._turns: IO[str] | None = None

    def lines(self) -> list[str]:
        path = self.folder / "bursts"
        return path.read_text().splitlines() if path.exists() else []

    async def ready(self) -> None:
        while self.lines()[:1] != ["ready"]:
            await asyncio.sleep(0.05)
        self._turns = await asyncio.to_thread(open, self.folder / "turns", "w", 1)

    async def burst(self) -> float:
        assert self._turns is not None
        count = len(self.lines())
        self._turns.write("go\n")
        while len(self.lines()) == count or not self.lines()[-1]:
            await asyncio.sleep(0.002)
        return float(self.lines()[-1])


@case("cost of the capsule between checkpoints", limit_s=150)
async def capsule(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """Bursts of training steps in turn inside and outside: the ratio of the medians, and the noise beside it."""
    found: dict[str, Any] = {}
    for number, (name, size) in enumerate(_SIZES.items()):
        job = place.job()
        inside = _Runner(job.folder)
        plain = place.base / f"plain{number}"
        plain.mkdir()
        os.chown(plain, USER, USER)
        outside = _Runner(plain)
        command = [PYTHON, "program.py", *size.split()]
        child = await asyncio.to_thread(
            subprocess.Popen, command, cwd=plain, env=environment(USE_LIBUV="0", HOME=str(plain)), user=USER, group=USER
        )
        place.children.append(child)  # type: ignore[arg-type]
        await job.start(f"exec {' '.join(command)} >>out 2>>err\n", environment())
        await asyncio.gather(inside.ready(), outside.ready())
        times: dict[str, list[float]] = {"inside": [], "outside": [], "again outside": []}
        for _ in range(_ROUNDS):
            times["outside"].append(await outside.burst())
            times["inside"].append(await inside.burst())
            times["again outside"].append(await outside.burst())
        medians = {who: statistics.median(values) for who, values in times.items()}
        base = medians["outside"]
        found[name] = {
            "median_s": round(base, 4),
            "inside": round(medians["inside"] / base - 1, 5),
            "outside_again": round(medians["again outside"] / base - 1, 5),
        }
        child.kill()
        await job.end()
    return found


_WAYS = {
    "as it comes": {},
    "without peer-to-peer": {"NCCL_P2P_DISABLE": "1"},
    "safe": SAFE,
}


@case("NCCL: all-reduce as it comes and safe", gpus=2, limit_s=150)
async def all_reduce(place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """GB/s on the bus for 1 GiB, two ranks, each way in a job of its own."""
    found: dict[str, Any] = {}
    for number, (name, env) in enumerate(_WAYS.items()):
        job = place.job()
        (job.folder / "program.py").write_text(programs.ALL_REDUCE)
        ranks = "".join(
            f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={29600 + number} {PYTHON} program.py "
            ">>out 2>>err &\n"
            for rank in (0, 1)
        )
        await job.start(f"{ranks}wait\n", environment(**env))
        await job.until(lambda job=job: job.lines("bandwidth"), 60, f"{name} has its figure")  # type: ignore[misc]
        found[name] = float(job.lines("bandwidth")[0])
        await job.end()
    return found
