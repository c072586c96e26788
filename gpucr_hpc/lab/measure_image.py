"""`scripts/measure_image`: what images cost, as ratios between ways of saving the same trees in one run."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucr_hpc import proc
from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import plugin
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.units import format_bytes

_INSIDE = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$WORK/top"
mkdir "$WORK/top/upper" "$WORK/top/work" "$WORK/top/root"
root=$WORK/top/root
mount -t overlay overlay -o "lowerdir=$ROOTFS,upperdir=$WORK/top/upper,workdir=$WORK/top/work" "$root"
mount --rbind /dev "$root/dev"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666
mount --bind "$root/dev/pts/ptmx" "$root/dev/ptmx"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/src" "$root/usr/lib/gpucr" "$root/bench/disk" "$root/bench/tmpfs" "$root/run/gpucr"
mount --bind "$SOURCE" "$root/src"
mount --bind "$BUILT" "$root/usr/lib/gpucr"
mount --bind "$WORK/disk" "$root/bench/disk"
mount -t tmpfs tmpfs "$root/bench/tmpfs"
cp "$(command -v lz4)" "$(command -v openssl)" "$root/usr/local/bin"
ip link set lo up
cd "$root"
mkdir -p old
pivot_root . old  # CRIU wants a root of its own; a chroot's mounts make no sense to it
exec chroot . /bin/sh -c 'umount -l /old && exec /usr/bin/python3 "$@"' sh "$@"
"""
_COLUMNS = ("freeze_s", "durable_s", "cpu_s", "peak_bytes", "stored_bytes", "restore_s")


def inside(arguments: list[str], work: Path, built: Path, rootfs: Path) -> Iterator[str]:
    """Lines of what a Python program says inside the root file system. Raises LabError when it fails."""
    env = proc.clean_env(
        {
            "WORK": str(work),
            "ROOTFS": str(rootfs),
            "SOURCE": str(CHECKOUT),
            "BUILT": str(built),
            "PYTHONPATH": "/src:/bench/disk/packages",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )
    for name in ("top", "disk"):
        (work / name).mkdir(exist_ok=True)
    argv = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "sh", "-c", _INSIDE]
    with subprocess.Popen([*argv, "sh", *arguments], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise LabError(reason=f"the measurement ended with status {process.returncode}")


def ratio(runs: dict[str, dict[str, Any]], ours: str, theirs: str, what: str) -> float | None:
    """ours / theirs, None when one of them was not measured."""
    one, other = runs.get(ours, {}).get(what), runs.get(theirs, {}).get(what)
    return round(one / other, 3) if one and other else None


def ratios(runs: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The ratios that matter, by name."""
    packed, full = "criu, tar, lz4, openssl", "gpucr"
    return {
        "durable / criu, tar, lz4, openssl": ratio(runs, full, packed, "durable_s"),
        "durable / criu to disk": ratio(runs, full, "criu to disk", "durable_s"),
        "freeze / criu to tmpfs": ratio(runs, "gpucr, runs on", "criu to tmpfs", "freeze_s"),
        "leaving: freeze / criu to tmpfs": ratio(runs, full, "criu to tmpfs", "freeze_s"),
        "restore / criu from tmpfs": ratio(runs, full, "criu to tmpfs", "restore_s"),
        "restore / openssl, lz4, tar, criu": ratio(runs, full, packed, "restore_s"),
        "stored / criu": ratio(runs, full, "criu to disk", "stored_bytes"),
        "unchanged: durable / full": ratio(runs, "gpucr, unchanged", full, "durable_s"),
        "unchanged: stored / full": ratio(runs, "gpucr, unchanged", full, "stored_bytes"),
    }


def show(report: dict[str, Any]) -> None:
    """A tree's table and ratios."""
    print(f"\n{report['tree']} tree, {format_bytes(report['size_bytes'])}")
    print(f"  {'':24}" + "".join(f"{name.rsplit('_', 1)[0]:>12}" for name in _COLUMNS))
    for name, run in report["runs"].items():
        cells = [
            ("-" if not run[column] else f"{run[column]:.2f} s")
            if column.endswith("_s")
            else (format_bytes(run[column]) if run[column] else "-")
            for column in _COLUMNS
        ]
        print(f"  {name:24}" + "".join(f"{cell:>12}" for cell in cells))
    for name, value in report["ratios"].items():
        print(f"  {name:40}{'-' if value is None else f'{value:.3f}'}")


def measure(work: Path, built: Path, system: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Primitives and, unless only these are wanted, the trees."""
    argv = ["-m", "gpucr_hpc.lab.image_primitives", *map(str, options.threads)]
    (line,) = inside(argv, work, built, system)
    primitives, trees = json.loads(line), []
    if not options.json:
        show_primitives(primitives)
    if not options.primitives:
        size = int(options.gib * (1 << 30))
        free = shutil.disk_usage(work).free
        if free < 3 * size:
            raise LabError(reason=f"{format_bytes(free)} free below {work}, {format_bytes(3 * size)} are needed")
        argv = ["-m", "gpucr_hpc.lab.image_bench", "--bytes", str(size)]
        argv += (["--only-ours"] if options.only_ours else []) + options.trees.split(",")
        for line in inside(argv, work, built, system):
            report = json.loads(line) | {"size_bytes": size}
            report["ratios"] = ratios(report["runs"])
            trees.append(report)
            if not options.json:
                show(report)
    return {"primitives": primitives, "trees": trees}


def cutting(work: Path, built: Path, system: Path, cache: Path, shown: bool) -> dict[str, Any]:
    """What a second dump of some programs has in common with the first one. OpenMM takes part when its wheel is in
    the lab's cache."""
    packages = work / "disk/packages"
    packages.mkdir(parents=True)
    for wheel in cache.glob("wheels/*/openmm-*.whl"):
        shutil.unpack_archive(wheel, packages, "zip")
    programs = []
    for line in inside(["-m", "gpucr_hpc.lab.image_cutting"], work, built, system):
        report = json.loads(line)
        programs.append(report)
        if shown:
            ways = "".join(f"{way:>16} {new:.3f} ({count})" for way, (new, count) in report["new"].items())
            print(f"{report['program']:14}{format_bytes(report['bytes']):>10}{ways}", flush=True)
    return {"programs": programs}


def show_primitives(primitives: dict[str, Any]) -> None:
    """Rates and their ratios to the limit."""
    print("\nprimitives, GB/s on warm buffers")
    print(f"  {'threads':40}" + "".join(f"{count:8}" for count in primitives["threads"]))
    for name, rates in primitives["rates"].items():
        print(f"  {name:40}" + "".join(f"{rate:8.2f}" for rate in rates))
    for name, value in primitives["ratios"].items():
        print(f"  {name:40}{value:8.3f}")


def counts(text: str) -> list[int]:
    """`4,8,16`: numbers of threads. ValueError for anything else."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"no number of threads: {min(found)}")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="measure_image", description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of each tree (default: 4)")
    parser.add_argument("--trees", default="mixed,random", help="mixed, random or both (default)")
    parser.add_argument("--only-ours", action="store_true", help="leave CRIU by itself out")
    parser.add_argument("--primitives", action="store_true", help="only LZ4, AES-GCM, ids, memory and their limit")
    parser.add_argument(
        "--threads", type=counts, default=[], metavar="N,N", help="of these, beside 1 (default: one for each processor)"
    )
    parser.add_argument("--cutting", action="store_true", help="only what a second dump has in common with the first")
    parser.add_argument("--disk", type=Path, help="directory on the disk to write to (default: the lab's)")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    options = parser.parse_args()
    try:
        lab = Lab(say=lambda line: print(f"lab: {line}", file=sys.stderr, flush=True))
        system = lab.build()
        built = plugin.build(CHECKOUT / "spank_plugin", system, lab.cache / "measure")
        assert built is not None
        place = options.disk or lab.cache
        with tempfile.TemporaryDirectory(prefix="gpucr-measure-", dir=place) as name:
            if options.cutting:
                report = cutting(Path(name), built, system, lab.cache, not options.json)
            else:
                report = measure(Path(name), built, system, options)
    except GpucrError as error:
        print(f"measure_image: error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
