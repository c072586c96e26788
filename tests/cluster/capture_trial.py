"""Dumps of one tree by CRIU alone and with large memory read beside it: a trial (trial_tree.py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule import network
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine import copier, early, large, pagemap, protobuf
from gpucr_hpc.engine.dump import Dump, Frozen
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.lab import image_bench as bench
from gpucr_hpc.lab import image_tree
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.model import Manifest
from tests.cluster.fill_trial import restored
from tests.cluster.trial_tree import LIMIT_S, PLACE, Tree, altered, end_copiers, main, say, standing


def pages(ours: bench.Ours, manifest: Manifest) -> dict[int, dict[int, bytes]]:
    """Every page of every process that is in an image, by pid and address; flags in front of the content."""
    found: dict[int, dict[int, bytes]] = {}
    key = DataKey.from_hex(ours._key(manifest))
    folder = ours.root / image_tree.JOB / manifest.checkpoint
    with ImageReader(
        lambda name: (folder / name).open("rb"), manifest.image(0), checkpoint=manifest.checkpoint, key=key
    ) as reader:
        for name in reader.names():
            if not name.startswith("pagemap-") or "shmem" in name:
                continue
            head, *entries = protobuf.messages(reader.read(name), name)
            content, at = reader.read(f"pages-{head[1][0]}.img"), 0
            mine = found[int(name.removeprefix("pagemap-").removesuffix(".img"))] = {}
            for entry in entries:
                count, flags = int(entry[5][0]), int(entry[4][0])
                for number in range(count):
                    address = int(entry[1][0]) + number * pagemap.PAGE_BYTES
                    mine[address] = bytes([flags]) + content[at : at + pagemap.PAGE_BYTES]
                    at += pagemap.PAGE_BYTES
            assert at == len(content), name
            assert list(mine) == sorted(mine), name
    return found


def difference(one: dict[int, dict[int, bytes]], other: dict[int, dict[int, bytes]]) -> dict[str, Any]:
    """Pages that only the first or only the second image has, that differ, and that have other flags."""
    assert one.keys() == other.keys()
    said = {"pages": 0, "missing": 0, "new": 0, "differ": 0, "flags": 0}
    for pid, mine in one.items():
        theirs = other[pid]
        said["pages"] += len(mine)
        said["missing"] += len(mine.keys() - theirs.keys())
        said["new"] += len(theirs.keys() - mine.keys())
        both = mine.keys() & theirs.keys()
        said["differ"] += sum(mine[at][1:] != theirs[at][1:] for at in both)
        said["flags"] += sum(mine[at][0] != theirs[at][0] for at in both)
    return said


@contextlib.contextmanager
def beside(yes: bool) -> Iterator[None]:
    """Whatever this machine has: memory is read beside CRIU, or not."""
    kept = large.PROCESSORS, large.LARGE_BYTES
    large.PROCESSORS, large.LARGE_BYTES = (1, 1 << 20) if yes else (1 << 20, 1 << 20)
    try:
        yield
    finally:
        large.PROCESSORS, large.LARGE_BYTES = kept


@contextlib.contextmanager
def without_copier() -> Iterator[None]:
    """As on a node where the program is missing."""
    kept, copier.PROGRAM = copier.PROGRAM, Path("/nonexistent")
    try:
        yield
    finally:
        copier.PROGRAM = kept


def unreadable(extents: str) -> str:
    """Some memory cannot be read: the reader meets an error half-way."""
    line = "            target, room = room[:size], room[size:]\n"
    broken = extents.replace(
        line,
        line + "            if ranges[0][0] >> 32 and next(_countdown) == 3:\n"
        "                raise MemoryUnreadable(reason='Input/output error')\n",
    )
    assert broken != extents
    return broken + "\n\nimport itertools\n\n_countdown = itertools.count()\n"


async def fails(tree: Tree, ours: bench.Ours) -> dict[str, Any]:
    """A dump whose memory cannot be read; what came of the tree."""
    kept, dumps = bench.Dump, []

    def made(*arguments: Any) -> Dump:
        dumps.append(kept(*arguments))
        return dumps[-1]

    bench.Dump = made  # type: ignore[assignment,misc]
    try:
        await ours.dump(tree)
    except GpucrError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    else:
        said = {"error": ""}
    finally:
        bench.Dump = kept  # type: ignore[misc]
    await dumps[0].undo()
    beats = {path.name: path.read_text() for path in PLACE.glob("*.alive")}
    wait_until(
        lambda: all(path.read_text() != beats[path.name] for path in PLACE.glob("*.alive")), LIMIT_S, "signs of life"
    )
    await network.unlock(image_tree.JOB)
    return {**said, "sums": tree.sums()}


async def by_criu_alone(tree: Tree, ours: bench.Ours) -> tuple[image_tree.Run, Manifest]:
    """A dump as the agent takes it after one whose memory could not be read."""
    kept = bench.Dump
    bench.Dump = functools.partial(kept, beside=False)  # type: ignore[assignment,misc]
    try:
        return await ours.dump(tree)
    finally:
        bench.Dump = kept  # type: ignore[misc]


class EarlyDump(Dump):
    """A dump before which memory is sealed while the tree runs and changes it: all that there is, as if a GPU's driver
    had just made it."""

    async def seal_early(self) -> None:
        """Until nothing is left."""
        processes = [p for p in namespace_processes(self._capsule.init_pid) if p.name == "python3"]
        growing = [early.Growing(p.nspid, p.pid) for p in processes]
        await self.expect_more()
        for process in growing:
            process._old = []
            assert process.settled() == []
            while ranges := process.settled():
                await self._worker.call("early", pid=process.nspid, ranges=ranges)

    async def capture(self) -> Frozen:
        await self.seal_early()
        stored = (await self._worker.call("progress"))["bytes_stored"]
        frozen = await super().capture()
        say("sealed early", {"stored": stored, "then": (await self._worker.call("progress"))["bytes_stored"] - stored})
        return frozen


class LonelyDump(EarlyDump):
    """Its gpucr-copier dies when the tree is about to be frozen."""

    async def capture(self) -> Frozen:
        await self.seal_early()
        end_copiers()
        return await super(EarlyDump, self).capture()


async def copier_dies(tree: Tree, ours: bench.Ours) -> dict[str, Any]:
    """What comes of such a dump, and of the tree."""
    kept = bench.Dump
    bench.Dump = LonelyDump  # type: ignore[misc]
    try:
        return await fails(tree, ours)
    finally:
        bench.Dump = kept  # type: ignore[misc]


async def sealed_early(tree: Tree, ours: bench.Ours) -> Manifest:
    kept = bench.Dump
    bench.Dump = EarlyDump  # type: ignore[misc]
    try:
        return (await ours.dump(tree))[1]
    finally:
        bench.Dump = kept  # type: ignore[misc]


async def trial() -> None:
    """All dumps, and restores of those that succeed."""
    async with standing() as (tree, ours):
        say("before", {"sums": tree.sums()})
        with beside(yes=False):
            run, by_criu = await ours.dump(tree)
            say("by criu", {"named": run.notes["beside_bytes"]})
        with beside(yes=True):
            run, manifest = await ours.dump(tree)
            size = {"plain": manifest.bytes_plain, "named": run.notes["beside_bytes"], "peak": run.peak_bytes}
            say("image", difference(pages(ours, by_criu), pages(ours, manifest)) | size)
            with without_copier():
                run, other = await ours.dump(tree)
                size = {"plain": other.bytes_plain, "named": run.notes["beside_bytes"], "peak": run.peak_bytes}
                say("image, by descriptors", difference(pages(ours, by_criu), pages(ours, other)) | size)
            room, on = await ours.dump(tree, base=by_criu, room_bytes=1 << 30)
            say("references", {"stored": on.bytes_stored, "plain": on.bytes_plain, "freeze_s": room.freeze_s})
            with altered("gpucr_hpc/image/extents.py", unreadable):
                say("unreadable", await fails(tree, ours))
                run, _ = await by_criu_alone(tree, ours)
                say("again", {"named": run.notes["beside_bytes"], "plain": run.notes["plain_bytes"]})
            say("copier gone", await copier_dies(tree, ours))
            soon = await sealed_early(tree, ours)
            say("beside", await restored(tree, ours, manifest))
            say("early", await restored(tree, ours, soon))
            with without_copier():
                say("beside, by descriptors", await restored(tree, ours, other))
            say("beside, references", await restored(tree, ours, on))


if __name__ == "__main__":
    main(trial)
