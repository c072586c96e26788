"""Restores of one tree by CRIU alone and with the fill, and with what can go wrong: a trial
(trial_tree.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.processes import wait_gone
from gpucr_hpc.engine import refill, stream
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.lab import image_bench as bench
from gpucr_hpc.lab import image_tree
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.model import Manifest
from tests.cluster.trial_tree import LIMIT_S, PLACE, Tree, altered, end_copiers, main, say, standing

Trouble = Callable[[WorkerClient, image_tree.Tree], Awaitable[None]]


async def restored(
    tree: Tree, ours: bench.Ours, manifest: Manifest, trouble: Trouble | None = None, *, huge_pages: bool = False
) -> dict[str, Any]:
    """One restore; what came of it."""
    await tree.end()
    builder = await tree.build(engine.pids(tree.meta))
    beats = {path.name: path.read_text() for path in PLACE.glob("*.alive")}
    worker = WorkerClient(str(ours.root), 0, 0)
    await worker.start(tree.run_dir.images, stream.SERVE_SOCKET)
    place: dict[str, Any] = {"job": image_tree.JOB, "checkpoint": manifest.checkpoint, "key": ours._key(manifest)}
    place |= {"holder": engine.in_image(tree.meta), "huge_pages": huge_pages}
    await worker.call("serve", entry=manifest.image(0).as_dict(), **place)
    said: dict[str, Any] = {"to_fill": len(await worker.call("to_fill"))}
    kept = refill.Refill._fill

    async def in_trouble(self: refill.Refill, pids: list[int]) -> int:
        assert trouble is not None
        await trouble(worker, tree)
        return await kept(self, pids)

    if trouble is not None:
        refill.Refill._fill = in_trouble  # type: ignore[method-assign,assignment]
    started = time.monotonic()
    task = asyncio.ensure_future(engine.restore(builder, tree.run_dir, worker, tree.meta, image_tree.ENGINE))
    if trouble is given_up:
        await reached.wait()
        task.cancel()
    try:
        back = await task
        tree.capsule = back.capsule
        said |= {"seconds": time.monotonic() - started, "fill_s": back.fill_s}
        await network.unlock(image_tree.JOB)
        said |= {"memory": tree.memory(), "mappings": tree.mappings(), "sums": tree.sums()}
    except (GpucrError, asyncio.CancelledError) as error:
        said |= {"error": type(error).__name__, "text": str(error)}
        pid = worker.pid
        assert pid is not None
        if trouble is given_up:
            os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(worker.close(), LIMIT_S)
        await tree.end()
        await asyncio.wait_for(wait_gone(pid), LIMIT_S)
        said["ran"] = {path.name: path.read_text() for path in PLACE.glob("*.alive")} != beats
        said["left"] = tree.programs()
    finally:
        refill.Refill._fill = kept  # type: ignore[method-assign]
        await worker.close()
    return said


async def worker_killed(worker: WorkerClient, _: image_tree.Tree) -> None:
    """It has the order, and dies."""
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)


def _kill_one(tree: image_tree.Tree) -> None:
    assert isinstance(tree, Tree)
    pid = tree.programs()[-1]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}/maps").read_text(), LIMIT_S, "the end of a process")


async def task_killed(_: WorkerClient, tree: image_tree.Tree) -> None:
    """One of the processes whose memory is about to be filled."""
    _kill_one(tree)


async def task_killed_late(worker: WorkerClient, tree: image_tree.Tree) -> None:
    """As before, when the worker has its memory already."""
    _when_it_fills(worker, lambda: _kill_one(tree))


async def copier_killed(worker: WorkerClient, _: image_tree.Tree) -> None:
    """What writes for the worker."""
    _when_it_fills(worker, end_copiers)


def _when_it_fills(worker: WorkerClient, trouble: Callable[[], None]) -> None:
    kept = worker.call

    async def call(verb: str, fds: Sequence[int] = (), **fields: Any) -> Any:
        if verb == "fill":
            trouble()
        return await kept(verb, fds, **fields)

    worker.call = call  # type: ignore[method-assign]


reached = asyncio.Event()


async def given_up(worker: WorkerClient, _: image_tree.Tree) -> None:
    """The agent gives the restore up, as at the end of an attempt."""
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    reached.set()


def damage(ours: bench.Ours, manifest: Manifest) -> None:
    """A byte in the middle of every pack: among the memory, which is most of it."""
    for part in manifest.image(0).packs:
        path = ours.root / image_tree.JOB / manifest.checkpoint / part.name
        with path.open("r+b") as file:
            file.seek(part.size_bytes // 2)
            byte = file.read(1)[0]
            file.seek(part.size_bytes // 2)
            file.write(bytes([byte ^ 1]))


async def trial() -> None:
    """One dump, all restores."""
    async with standing() as (tree, ours):
        say("before", {"memory": tree.memory(), "mappings": tree.mappings(), "sums": tree.sums()})
        _, manifest = await ours.dump(tree)
        with altered("gpucr_hpc/engine/fillplan.py", leaves_all_to_criu):
            say("criu", await restored(tree, ours, manifest))
        say("fill", await restored(tree, ours, manifest))
        with altered("gpucr_hpc/engine/hugepages.py", takes_small_ones):
            say("fill, huge pages", await restored(tree, ours, manifest, huge_pages=True))
        _, again = await ours.dump(tree, base=manifest)
        say("fill, references", await restored(tree, ours, again))
        for trouble in (worker_killed, task_killed, task_killed_late, copier_killed, given_up):
            said = await restored(tree, ours, manifest, trouble=trouble)
            say(trouble.__name__, said)
        damage(ours, manifest)
        say("damaged", await restored(tree, ours, manifest))


def leaves_all_to_criu(plan: str) -> str:
    """Only trees that no machine has are filled."""
    return plan.replace("TREE_BYTES = 128 << 20", "TREE_BYTES = 1 << 60")


def takes_small_ones(hugepages: str) -> str:
    """Mappings of this tree are large enough."""
    return hugepages.replace("LEAST_BYTES = 64 << 20", "LEAST_BYTES = 8 << 20")


if __name__ == "__main__":
    main(trial)
