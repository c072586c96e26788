"""How much of a second dump is found again in the first one, by way of cutting memory into chunks; inside the lab's
root file system for `scripts/measure_image --cutting`.

Each program is dumped twice by CRIU alone, some seconds apart, while it works. `page`: the least that could be stored.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucr_hpc.engine import pagemap
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.cutting import PAGE_BYTES, cuts, marks
from gpucr_hpc.lab.image_criu import raw_dump
from gpucr_hpc.lab.image_tree import TMPFS, Tree, prepare
from gpucr_hpc.proc import clean_env

_GAP_S = 4.0
_NUMPY = """
import sys, numpy as np
rng = np.random.default_rng(1)
a, b, log = rng.standard_normal(({n}, {n})), rng.standard_normal({size}), []
open(sys.argv[3], "w").write("ready")
while True:
    a = a @ a.T / {n}
    b[:{part}] += a.ravel()[:{part}]
    log.append(b[:50].tolist())
"""
_HEAP = """
import os, sys, time
big, grown = bytearray(os.urandom(150 << 20)), {}
open(sys.argv[3], "w").write("ready")
while True:
    grown[len(grown)] = str(len(grown)) * 20
    if len(grown) % 2000 == 0:
        time.sleep(0.05)
"""
_OPENMM = """
import sys, numpy as np, openmm as mm
n, length = 30000, 9.0
system, force = mm.System(), mm.NonbondedForce()
force.setNonbondedMethod(force.CutoffPeriodic)
system.setDefaultPeriodicBoxVectors((length, 0, 0), (0, length, 0), (0, 0, length))
for _ in range(n):
    system.addParticle(39.9)
    force.addParticle(0, 0.34, 0.1)
system.addForce(force)
step = mm.LangevinMiddleIntegrator(120, 1, 0.002)
context = mm.Context(system, step, mm.Platform.getPlatformByName("CPU"))
context.setPositions(np.stack(np.meshgrid(*[np.arange(32) * length / 32] * 3), -1).reshape(-1, 3)[:n])
step.step(5)
open(sys.argv[3], "w").write("ready")
while True:
    step.step(10)
"""
PROGRAMS = {
    "numpy": _NUMPY.format(n=2000, size=30_000_000, part=1_000_000),
    "growing heap": _HEAP,
    "MPI, 3 ranks": _NUMPY.format(n=600, size=8_000_000, part=300_000),
    "OpenMM": _OPENMM,
}
Way = Callable[[bytes], Iterator[bytes]]


def fixed(size: int) -> Way:
    """Pieces of one size."""

    def cut(data: bytes) -> Iterator[bytes]:
        return (data[at : at + size] for at in range(0, len(data), size))

    return cut


def by_content(data: bytes) -> Iterator[bytes]:
    """As the writer cuts."""
    ends = [page * PAGE_BYTES for page in cuts(marks(memoryview(data)))]
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        yield data[start:end]


WAYS: dict[str, Way] = {
    "fixed, 1 MiB": fixed(CHUNK_BYTES),
    "fixed, 64 KiB": fixed(64 << 10),
    "by content": by_content,
    "page": fixed(PAGE_BYTES),
}


def memory_of(images: Path) -> list[bytes]:
    """The pages files of processes in a directory of CRIU's."""
    found = [pagemap.parse(path.read_bytes()).pages_id for path in sorted(images.glob("pagemap-[0-9]*.img"))]
    return [(images / f"pages-{number}.img").read_bytes() for number in found]


def share_of_new(way: Way, first: list[bytes], second: list[bytes]) -> tuple[float, int]:
    """Part of the second dump's bytes that are not zero and not in the first one; and its number of chunks."""
    known = {hashlib.blake2b(part).digest() for data in first for part in way(data)}
    new = total = count = 0
    for data in second:
        for part in way(data):
            count += 1
            if part.count(0) == len(part):
                continue
            total += len(part)
            name = hashlib.blake2b(part).digest()
            new += len(part) if name not in known else 0
            known.add(name)
    return new / total, count


async def measure(name: str) -> dict[str, object]:
    """Two dumps of a program, and what each way finds."""
    Path("/bench/program.py").write_text(PROGRAMS[name])
    tree = Tree(name.split()[0].strip(","), 0, command=("mpirun", "-n", "3") if name.startswith("MPI") else ())
    dumps = []
    await tree.start()
    try:
        for number in range(2):
            if number:
                await asyncio.sleep(_GAP_S)
            images = TMPFS / f"cutting{number}"
            await raw_dump(tree, images)
            dumps.append(memory_of(images))
            shutil.rmtree(images)
    finally:
        await tree.end()
    ways = {way: share_of_new(cut, dumps[0], dumps[1]) for way, cut in WAYS.items()}
    return {"program": name, "bytes": sum(map(len, dumps[1])), "new": ways}


def main() -> None:
    """Prints a JSON object for each program, one a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    os.environ["PATH"] = clean_env()["PATH"]
    prepare()
    for name in parser.parse_args().programs:
        probe = [sys.executable, "-c", "import openmm"]
        if name == "OpenMM" and subprocess.run(probe, check=False, capture_output=True).returncode:
            print("measure_image: no OpenMM, left out", file=sys.stderr)
            continue
        print(json.dumps(asyncio.run(measure(name))), flush=True)


if __name__ == "__main__":
    main()
