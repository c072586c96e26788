"""What runs inside the root file system for `scripts/measure_image`: each way of saving meets the same tree in one run.

Ours goes through the product's own code (capsule, engine, worker, store); the others are CRIU by itself, with the same
options.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import shutil
import time
from pathlib import Path

from gpucr_hpc.agent.participant import available_memory
from gpucr_hpc.capsule import network
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine import stream
from gpucr_hpc.engine.dump import Dump
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.lab.image_criu import pack, raw_dump, raw_restore, unpack
from gpucr_hpc.lab.image_tree import DISK, ENGINE, JOB, PROGRAM, TMPFS, UID, Run, Tree, cpu_of, prepare
from gpucr_hpc.model import ImageEntry, Manifest, new_checkpoint_id
from gpucr_hpc.proc import clean_env

SITE, SIGNING = SiteKey(b"s" * 32), SigningKey(b"g" * 32)
PACKS = 4


class Ours:
    """The product's own way, with a store on the disk."""

    def __init__(self) -> None:
        self.root = DISK / "store"
        self.last: Manifest | None = None

    def _key(self, manifest: Manifest) -> str:
        return DataKey.unwrap(manifest.slots, (SITE,), manifest.checkpoint).reveal_hex()

    async def dump(
        self, tree: Tree, base: Manifest | None = None, room_bytes: int | None = None
    ) -> tuple[Run, Manifest]:
        """room_bytes: the tree runs on as soon as it is read into as much memory, or sealed beyond it; None: it stays
        frozen until its image is durable, as one that leaves."""
        run, capsule, checkpoint = Run(), tree.capsule, new_checkpoint_id()
        assert capsule is not None
        key = DataKey.generate(SITE.id_key(JOB))
        earlier = None
        if base is not None:
            earlier = {"checkpoint": base.checkpoint, "entry": base.image(0).as_dict(), "key": self._key(base)}
        with cpu_of(run):
            worker = WorkerClient(str(self.root), 0, 0)
            await worker.start(tree.run_dir.images, stream.CAPTURE_SOCKET)
            problem = await worker.call(
                "capture",
                job=JOB,
                checkpoint=checkpoint,
                node_rank=0,
                key=key.reveal_hex(),
                begin=True,
                packs=PACKS,
                base=earlier,
                room_bytes=room_bytes or 0,
                expected_bytes=tree.size,
            )
            assert problem is None, problem
            await network.lock(JOB)
            dump = Dump(capsule, tree.run_dir, worker, ENGINE)
            start = time.monotonic()
            frozen = await dump.capture()
            run.notes["pipes_read_s"] = time.monotonic() - start
            run.notes["beside_bytes"] = frozen.beside_bytes

            async def run_on() -> None:
                await dump.resume()
                run.freeze_s = time.monotonic() - frozen.frozen_at
                await network.unlock(JOB)

            if room_bytes is not None:
                await run_on()
            entry = ImageEntry.from_dict(await worker.call("seal"))
            tree.meta = {"tree": engine.tree_meta(capsule, frozen.processes)}
            manifest = Manifest(
                checkpoint=checkpoint,
                job=JOB,
                uid=UID,
                gid=UID,
                reason="demand",
                run=0,
                images=[entry],
                slots=[key.wrap(SITE, checkpoint)],
            )
            data = manifest_file.encode(manifest, SIGNING)
            await worker.call("publish", manifest=base64.b64encode(data).decode())
            run.durable_s = time.monotonic() - start
            run.peak_bytes = peak_of(worker)
            run.notes |= times_of(worker)
            if room_bytes is None:
                await run_on()
            await worker.close()
        run.stored_bytes = manifest.bytes_stored
        run.notes["plain_bytes"] = manifest.bytes_plain
        return run, manifest

    async def restore(self, tree: Tree, manifest: Manifest, run: Run) -> None:
        await tree.end()
        builder = await tree.build(engine.pids(tree.meta))
        worker = WorkerClient(str(self.root), 0, 0)
        await worker.start(tree.run_dir.images, stream.SERVE_SOCKET)
        start = time.monotonic()
        await worker.call(
            "serve",
            job=JOB,
            checkpoint=manifest.checkpoint,
            entry=manifest.image(0).as_dict(),
            key=self._key(manifest),
            holder=engine.in_image(tree.meta),
        )
        restored = await engine.restore(builder, tree.run_dir, worker, tree.meta, ENGINE)
        tree.capsule = restored.capsule
        await network.unlock(JOB)
        run.restore_s = time.monotonic() - start
        run.notes["fill_s"] = restored.fill_s
        run.notes["restore_peak_bytes"] = peak_of(worker)
        run.notes |= {f"restore_{name}": seconds for name, seconds in times_of(worker).items()}
        await worker.close()


def peak_of(worker: WorkerClient) -> int:
    """Largest resident size of a worker so far, in bytes."""
    assert worker.pid is not None
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def times_of(worker: WorkerClient) -> dict[str, float]:
    """CPU seconds of a worker so far."""
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return {"worker_user_s": int(fields[11]) / tick, "worker_system_s": int(fields[12]) / tick}


async def measure(kind: str, size_bytes: int, only_ours: bool) -> dict[str, Run]:
    """All ways for one tree; each restore is checked by the process's own checksum."""
    tree, ours, runs = Tree(kind, size_bytes), Ours(), {}
    raw_disk, raw_memory, packed = DISK / "raw", TMPFS / "raw", DISK / "packed"
    await tree.start()
    right = tree.out.read_text()
    try:
        if not only_ours:
            runs["criu to disk"] = await raw_dump(tree, raw_disk)
            runs["criu to tmpfs"] = await raw_dump(tree, raw_memory)
            runs["criu, tar, lz4, openssl"] = packing = pack(raw_disk, packed)
            packing.freeze_s = runs["criu to disk"].freeze_s
            packing.durable_s += runs["criu to disk"].durable_s
            packing.cpu_s += runs["criu to disk"].cpu_s
            shutil.rmtree(raw_disk)
        runs["gpucr"], full = await ours.dump(tree)
        runs["gpucr, unchanged"], again = await ours.dump(tree, base=full)
        room = available_memory() * ENGINE.room_percent // 100
        runs["gpucr, runs on"], running = await ours.dump(tree, room_bytes=room)
        runs["gpucr, runs on"].notes["room_bytes"] = room
        if not only_ours:
            runs["criu to tmpfs"].restore_s = await raw_restore(tree, raw_memory)
            assert f"{right} {right}" == tree.checksum(), "memory differs after criu restore"
            shutil.rmtree(raw_memory)
            seconds = unpack(packed, raw_memory)
            packing.restore_s = seconds + await raw_restore(tree, raw_memory)
            shutil.rmtree(raw_memory)
        await ours.restore(tree, full, runs["gpucr"])
        assert f"{right} {right}" == tree.checksum(), "memory differs after gpucr's restore"
        await ours.restore(tree, again, runs["gpucr, unchanged"])
        assert f"{right} {right}" == tree.checksum(), "memory differs after gpucr's restore of references"
        await ours.restore(tree, running, runs["gpucr, runs on"])
        assert f"{right} {right}" == tree.checksum(), "memory differs after a checkpoint while it ran on"
    finally:
        with contextlib.suppress(Exception):
            await tree.end()
        for place in (DISK / "store", raw_disk, raw_memory):
            shutil.rmtree(place, ignore_errors=True)
        packed.unlink(missing_ok=True)
    return runs


def main() -> None:
    """Prints a JSON object for each tree, one a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("kinds", nargs="+")
    options = parser.parse_args()
    os.environ["PATH"] = clean_env()["PATH"]
    prepare()
    Path("/bench/program.py").write_text(PROGRAM)
    Path("/bench/pass").write_text("not a secret\n")
    for kind in options.kinds:
        runs = asyncio.run(measure(kind, options.bytes, options.only_ours))
        print(json.dumps({"tree": kind, "runs": {name: vars(run) for name, run in runs.items()}}), flush=True)


if __name__ == "__main__":
    main()
