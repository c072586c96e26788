"""What runs inside the root file system for `scripts/measure_image`: trees of processes, dumped and restored.

Every way of saving meets the same tree in one run. Ours goes through the product's own code (capsule, engine, worker,
store); the others are CRIU by itself, with the same options.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpucr_hpc import wire
from gpucr_hpc.agent import shepherd
from gpucr_hpc.agent.participant import available_memory
from gpucr_hpc.capsule import Capsule, Geometry, RunDir, build, namespace_processes, network
from gpucr_hpc.capsule.capsule import Builder, Identity, RestorePids, discard
from gpucr_hpc.config import EngineConfig, NetworkConfig
from gpucr_hpc.engine import criu, stream
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine.dump import Dump, remove_link_remaps
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.model import ImageEntry, Manifest, new_checkpoint_id
from gpucr_hpc.proc import clean_env

JOB, UID = "1", 1000
DISK, TMPFS = Path("/bench/disk"), Path("/bench/tmpfs")
NETWORK = NetworkConfig(nat=False)
ENGINE = EngineConfig()
SITE, SIGNING = SiteKey(b"s" * 32), SigningKey(b"g" * 32)
PACKS = 4
#: More Python packages for the programs.
EXTRA = DISK / "packages"
ONE_THREAD = [f"{name}=1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENMM_CPU_THREADS")]

# Memory of a training process: zero, compressible (words out of a small dictionary, with a count in each page, so that
# no two pages are the same) and random, in turns of 64 MiB. On SIGUSR1 it changes SHARE of its pages; on SIGUSR2 it
# writes a checksum of everything to a file.
PROGRAM = r"""
import mmap, os, random, signal, sys, zlib
kind, size, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mib, page = 1 << 20, 4096
rng = random.Random(7)
words = [rng.randbytes(8) for _ in range(300)]
text = b"".join(rng.choice(words) if rng.random() < 0.85 else rng.randbytes(8) for _ in range(mib // 8)) * 2
noise = open("/dev/urandom", "rb", buffering=0)
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
view = memoryview(memory)
for at in range(0, size, mib):
    end = min(at + mib, size)
    part = (at // (64 * mib)) % 3 if kind == "mixed" else 2
    if part == 0:
        view[at:end] = bytes(end - at)
    elif part == 1:
        for place in range(at, end, page):
            start = rng.randrange(mib)
            view[place : place + page] = text[start : start + page]
            view[place : place + 8] = place.to_bytes(8, "little")
    else:
        noise.readinto(view[at:end])
def check(*_):
    sums = zlib.crc32(view)
    with open(out + ".new", "w") as file:
        file.write(f"{os.getpid()} {sums}")
    os.rename(out + ".new", out)
signal.signal(signal.SIGUSR2, check)
check()
while True:
    signal.pause()
"""


@dataclass
class Run:
    """One way of saving: seconds, bytes."""

    freeze_s: float = 0.0
    durable_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    stored_bytes: int = 0
    restore_s: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)


@contextmanager
def cpu_of(run: Run) -> Iterator[None]:
    """CPU seconds of this process and its ended children meanwhile."""

    def now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    start = now()
    yield
    run.cpu_s += now() - start


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def sync(directory: Path) -> None:
    subprocess.run(["sync", "-f", str(directory)], check=True)


class Tree:
    """A capsule with a program that holds memory, as `command` starts it; without a command, one process."""

    def __init__(self, kind: str, size_bytes: int, command: tuple[str, ...] = ()) -> None:
        self.kind, self.size, self.command = kind, size_bytes, command
        self.run_dir = RunDir.of("/run/gpucr", JOB)
        self.out = Path(f"/bench/work/{kind}.sum")
        self.geometry = Geometry(("n1",), ("n1",), ("127.0.0.1",))
        self.who = Identity(UID, UID, (UID,))
        self.capsule: Capsule | None = None
        self.meta: dict[str, Any] = {}

    async def build(self, pids: RestorePids | None = None) -> Builder:
        self.run_dir.make(UID, UID)
        builder = await build(
            JOB,
            self.run_dir,
            self.who,
            geometry=self.geometry,
            node_rank=0,
            config=NETWORK,
            pids=pids,
        )
        self.capsule = builder.capsule
        return builder

    async def start(self) -> None:
        self.out.unlink(missing_ok=True)
        await self.build()
        with socket.socket(socket.AF_UNIX) as sock, open(os.devnull, "r+b") as null:
            sock.connect(self.run_dir.shepherd_socket)
            frame = wire.make(
                wire.Type.SPAWN,
                ("ARG", [*self.command, "/usr/bin/python3", "/bench/program.py", *self._arguments()]),
                ("ENV", ["PATH=/usr/bin:/bin", "HOME=/tmp", f"PYTHONPATH={EXTRA}", *ONE_THREAD]),
                ("RLIMIT", []),
                **{"TASK": "batch.0", "RANK": 0, "CWD": "/bench/work", "UMASK": 0o22, "NICE": 0, "AFFINITY": ""},
            )
            socket.send_fds(sock, [wire.encode(frame)], [null.fileno()] * 3)
            self._expect(sock, wire.Type.SPAWNED)
            sock.sendall(wire.encode(wire.make(wire.Type.GO, TASK="batch.0")))
            wait_until(self.out.exists, 300, "the process's checksum")
        await shepherd.detach(JOB, "n1", self.run_dir.shepherd_socket)

    def _arguments(self) -> list[str]:
        return [self.kind, str(self.size), str(self.out)]

    @staticmethod
    def _expect(sock: socket.socket, kind: wire.Type) -> None:
        head = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        found, length = wire.parse_header(head)
        frame = wire.parse_payload(found, sock.recv(length, socket.MSG_WAITALL))
        if frame.type is not kind:
            raise SystemExit(f"measure_image: the shepherd answered {frame}")

    def checksum(self) -> str:
        """What the process says about its memory now."""
        before = self.out.read_text()
        self.out.unlink()
        assert self.capsule is not None
        (process,) = [p for p in namespace_processes(self.capsule.init_pid) if p.name == "python3"]
        os.kill(process.pid, signal.SIGUSR2)
        wait_until(self.out.exists, 300, "the process's checksum")
        return f"{before} {self.out.read_text()}"

    async def end(self) -> None:
        await discard(JOB, self.run_dir, self.capsule)


# --- CRIU by itself ---------------------------------------------------------------------------------------


def frozen_us(images: Path) -> int:
    """CRIU's own word for how long the tasks were frozen, in microseconds."""
    shown = subprocess.run(
        ["crit", "decode", "-i", str(images / "stats-dump")], check=True, capture_output=True, text=True
    ).stdout
    return int(json.loads(shown)["entries"][0]["dump"]["frozen_time"])


async def raw_dump(tree: Tree, images: Path) -> Run:
    """criu dump into a directory, which is synced."""
    run, capsule = Run(), tree.capsule
    assert capsule is not None
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    work = tree.run_dir.work
    argv = [arg for arg in criu.dump_argv(ENGINE, capsule.root, images, images) if arg != "--stream"]
    at = argv.index("--action-script")
    del argv[at : at + 2]
    argv[argv.index("--libdir") + 1] = str(work / "libdir")
    with cpu_of(run):
        start = time.monotonic()
        done = subprocess.run(criu.enter_argv(capsule.init_pid, UID, UID, argv), env=clean_env(), check=False)
        if done.returncode:
            raise SystemExit(f"measure_image: criu dump failed: {criu.explain_file(images / 'dump.log')}")
        sync(images)
        run.durable_s = time.monotonic() - start
    remove_link_remaps(capsule)
    run.freeze_s, run.stored_bytes = frozen_us(images) / 1e6, size_of(images)
    return run


async def raw_restore(tree: Tree, images: Path) -> float:
    """criu restore from a directory, from the order to the running tree."""
    await tree.end()
    root = tree.meta["tree"]["root"]  # in CRIU's files as they are
    builder = await tree.build(replace(engine.pids(tree.meta), holder=0, old_holder=root))
    argv = [arg for arg in criu.restore_argv(ENGINE, images, tree.run_dir.work) if arg != "--stream"]
    start = time.monotonic()
    tree.capsule = await builder.restore(
        argv,
        clean_env(),
        old_root=root,
        shepherd=tree.meta["tree"]["shepherd"],
        log=tree.run_dir.work / "restore.log",
    )
    await network.unlock(JOB)
    return time.monotonic() - start


_ENCRYPT = "openssl enc -aes-256-ctr -pbkdf2 -pass file:/bench/pass"


def pack(images: Path, target: Path) -> Run:
    """tar | lz4 | openssl, synced."""
    run = Run()
    with cpu_of(run):
        start = time.monotonic()
        command = f"set -o pipefail; tar -C {images} -cf - . | lz4 -1 -q -c | {_ENCRYPT} -out {target}"
        subprocess.run(["bash", "-c", command], check=True)
        sync(target.parent)
        run.durable_s = time.monotonic() - start
    run.stored_bytes = target.stat().st_size
    return run


def unpack(source: Path, images: Path) -> float:
    """Into a directory, for a restore; seconds."""
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    start = time.monotonic()
    command = f"set -o pipefail; {_ENCRYPT} -d -in {source} | lz4 -d -q -c | tar -C {images} -xf -"
    subprocess.run(["bash", "-c", command], check=True)
    return time.monotonic() - start


# --- ours -------------------------------------------------------------------------------------------------


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


# --- one tree ---------------------------------------------------------------------------------------------


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


def prepare() -> None:
    """A place for the programs, and CRIU's cache of what the kernel can do."""
    Path("/bench/work").mkdir(exist_ok=True)
    os.chown("/bench/work", UID, UID)
    subprocess.run(["criu", "check", "--no-default-config"], check=True, capture_output=True, env=clean_env())


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
