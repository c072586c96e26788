"""Random programs on the fake NCCL, undisturbed and under the interposer with cuts at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpucr_hpc.engine.nccl.cut import Cut
from gpucr_hpc.engine.nccl.link import Link
from gpucr_hpc.engine.nccl.node import NodeRanks
from gpucr_hpc.errors import GpucrError, NcclCutNotReached

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "spank_plugin" / "nccl"
BUILD = ROOT / "spank_plugin" / "build" / "nccl"
FAKE_NCCL = [SOURCES / "fake" / name for name in ("socket.c", "operations.c", "communicators.c")]
SANITIZERS = {"plain": "", "asan": "libasan.so", "tsan": "libtsan.so"}


@dataclass
class Outcome:
    """digests: (seed, thread) -> digest of each rank, in order. seconds: of each cut, torn down and made again."""

    digests: dict[tuple[int, int], list[str]]
    cuts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stderr: str = ""


def build() -> None:
    """The interposer in all its forms, the fakes and the test program; by one at a time."""
    with (SOURCES / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-s", "-C", str(SOURCES), "test-programs"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr


def environment(folder: Path, kind: str | None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUCR_", "NCCL_"))}
    env["LD_LIBRARY_PATH"] = str(BUILD / "tsan" if kind == "tsan" else BUILD / "fake" / "lib")
    if kind is not None:
        env["GPUCR_NCCL_DIR"] = str(folder)
        preload = [str(BUILD / ("" if kind == "plain" else kind) / "libgpucr_nccl.so")]
        if SANITIZERS[kind]:
            found = subprocess.run(
                ["gcc", f"-print-file-name={SANITIZERS[kind]}"], capture_output=True, text=True, check=True
            )
            preload.insert(0, found.stdout.strip())
        env["LD_PRELOAD"] = " ".join(preload)
        env["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1"
        env["TSAN_OPTIONS"] = "halt_on_error=1:abort_on_error=1"
    return env


async def run(
    folder: Path,
    *,
    ranks: int,
    first: int,
    count: int,
    steps: int,
    threads: int,
    kind: str | None = None,
    seed: int = 0,
    limit_s: float = 240.0,
    cut_limit_s: float = 20.0,
    pause_s: float = 0.02,
    half_rebuilt: float = 0.1,
) -> Outcome:
    """Run `count` programs on `ranks` processes. kind: None without the interposer, or which build of it; with it cuts are
    made until the programs have ended. half_rebuilt: share of cuts whose agent dies while it has ranks made again."""
    folder.mkdir(parents=True)
    children = []
    files = []
    for rank in range(ranks):
        out, err = (folder / f"out.{rank}").open("wb"), (folder / f"err.{rank}").open("wb")
        files += [out, err]
        arguments = [str(folder), str(rank), str(ranks), str(first), str(count), str(steps), str(threads)]
        children.append(
            await asyncio.create_subprocess_exec(
                str(BUILD / ("tsan" if kind == "tsan" else "fake") / "program"),
                *arguments,
                stdout=out,
                stderr=err,
                env=environment(folder, kind),
            )
        )
    outcome = Outcome({})
    ends = asyncio.gather(*(child.wait() for child in children))
    pids = [child.pid for child in children]
    cutting = asyncio.ensure_future(
        _cuts(folder, pids, outcome, seed, cut_limit_s, pause_s, ends, half_rebuilt)
        if kind is not None
        else asyncio.sleep(0)
    )
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wait({ends, cutting}, return_when=asyncio.FIRST_EXCEPTION)
            statuses = await ends
        await cutting
    finally:
        cutting.cancel()
        with contextlib.suppress(asyncio.CancelledError, GpucrError):
            await cutting
        for child in children:
            if child.returncode is None:
                child.kill()
                await child.wait()
        for file in files:
            file.close()
        outcome.stderr = "".join((folder / f"err.{rank}").read_text()[-2000:] for rank in range(ranks))
        if outcome.stderr:
            print(outcome.stderr, file=sys.stderr)
    assert statuses == [0] * ranks, (statuses, outcome.stderr, outcome.errors)
    for rank in range(ranks):
        for line in (folder / f"out.{rank}").read_text().splitlines():
            program, thread, digest = line.split()
            outcome.digests.setdefault((int(program), int(thread)), []).append(digest)
    return outcome


async def _cuts(
    folder: Path,
    pids: list[int],
    outcome: Outcome,
    seed: int,
    limit_s: float,
    pause_s: float,
    ends: asyncio.Future[list[int]],
    half_rebuilt: float,
) -> None:
    chance = random.Random(seed)
    sockets = [folder / f"gpucr-nccl.{pid}" for pid in pids]
    while not all(path.exists() for path in sockets):
        if ends.done():
            return
        await asyncio.sleep(0.002)
    while not ends.done():
        await asyncio.sleep(chance.uniform(0, pause_s))
        await one_cut(sockets, pids, outcome, limit_s, chance, ends, half_rebuilt)


async def one_cut(
    sockets: list[Path],
    pids: list[int],
    outcome: Outcome,
    limit_s: float,
    chance: random.Random,
    ends: asyncio.Future[list[int]],
    half_rebuilt: float,
) -> None:
    loop = asyncio.get_running_loop()
    ranks = NodeRanks([])
    start = loop.time()
    try:
        await _connect(ranks, sockets, pids)
        cut = Cut("1", [NodeRanks(ranks.links[:1]), NodeRanks(ranks.links[1:])])  # as on two nodes
        await cut.bring_back(limit_s)  # a cut before may have been left by its agent
        await cut.take(limit_s)
        if chance.random() < 0.15:
            await cut.release()
            outcome.cuts["released"] += 1
            return
        if chance.random() < 0.1:
            outcome.cuts["left"] += 1  # as if the agent had died: the next one brings back what there is
            return
        if chance.random() < 0.1:
            await cut.nodes[0].order("destroy")
            outcome.cuts["half destroyed"] += 1  # the agent dies when some nodes have heard of it
            return
        await cut.tear_down(limit_s)
        for pid in pids:
            assert "fake-nccl-peer" not in Path(f"/proc/{pid}/maps").read_text(), "peer memory after the end"
        if chance.random() < half_rebuilt:
            node = chance.choice(cut.nodes)
            await node.order("rebuild", await cut._ids(await cut.ask()))
            outcome.cuts["half rebuilt"] += 1  # the agent dies when some nodes have heard of the new ids
            return
        if chance.random() < 0.3:  # as over a dump: another agent comes
            await ranks.close()
            await _connect(ranks, sockets, pids)
            cut = Cut("1", [ranks])
        await cut.bring_back(limit_s)
        outcome.cuts["whole"] += 1
        outcome.seconds.append(loop.time() - start)
    except NcclCutNotReached as error:
        outcome.cuts["not reached"] += 1
        outcome.errors.append(str(error))
    except GpucrError as error:
        try:  # a process that has ended meanwhile is no failure
            await asyncio.wait_for(asyncio.shield(ends), 2.0)
            outcome.cuts["at the end"] += 1
        except TimeoutError:
            outcome.errors.append(str(error))
            raise
    finally:
        ranks.drop()


async def _connect(ranks: NodeRanks, sockets: list[Path], pids: list[int]) -> None:
    ranks.links = []
    for path, pid in zip(sockets, pids, strict=True):
        ranks.links.append(await Link.connect(path, pid, os.getuid()))
