"""CRIU by itself, with the options that ours has, and what packs its images: for `scripts/measure_image`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from gpucr_hpc.capsule import network
from gpucr_hpc.engine import criu
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine.dump import remove_link_remaps
from gpucr_hpc.lab.image_tree import ENGINE, JOB, Run, Tree, cpu_of, size_of, sync
from gpucr_hpc.proc import clean_env


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
        done = subprocess.run(criu.enter_argv(capsule, argv), env=clean_env(), check=False)
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
