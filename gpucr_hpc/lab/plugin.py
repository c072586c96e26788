"""Builds the C parts (spank_plugin/) with the root file system's compiler and headers.

In a mount namespace of its own, on an overlay whose upper layer is thrown away: the cached root file system
is not changed. Results are cached by the hash of the sources and of the root file system.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError, ToolFailed

_IN_ROOTFS = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$WORK/tmp"
mkdir "$WORK/tmp/upper" "$WORK/tmp/work" "$WORK/tmp/root"
root=$WORK/tmp/root
mount -t overlay overlay -o "lowerdir=$ROOTFS,upperdir=$WORK/tmp/upper,workdir=$WORK/tmp/work" "$root"
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"
mkdir -p "$root/src" "$root/out"
mount --bind "$WORK/src" "$root/src"
mount --bind "$WORK/out" "$root/out"
exec chroot "$root" make -C /src "$@"
"""
_INSTALL = ["SLURM_INCLUDE=/usr/include", "DESTDIR=/out", "plugindir=/usr/lib/gpucr", "all", "install"]
_SKIPPED = ("build", "__pycache__")
_LIMIT_S = 600
_KEPT_S = 86400


def sources_digest(source: Path, rootfs: Path) -> str:
    """Name of the build of these sources: over every file's path, mode and content."""
    total = hashlib.sha256(f"{rootfs.parent.name}\0{_IN_ROOTFS}{_INSTALL}".encode())
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and relative.parts[0] not in _SKIPPED:
            total.update(f"\0{relative}\0{path.stat().st_mode & 0o111}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def make(source: Path, rootfs: Path, work: Path, arguments: Sequence[str]) -> proc.Result:
    """`make` in a copy of the sources, in the root file system's own surroundings. What it writes below /out is in
    `work`/out. Raises ToolFailed with the end of its output."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "out").mkdir(parents=True)
    (work / "tmp").mkdir()
    shutil.copytree(source, work / "src", ignore=shutil.ignore_patterns(*_SKIPPED), symlinks=True)
    env = proc.clean_env({"WORK": str(work), "ROOTFS": str(rootfs)})
    argv = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", _IN_ROOTFS, "make", *arguments]
    return proc.run(argv, env=env, timeout_s=_LIMIT_S).check()


def build(source: Path, rootfs: Path, cache: Path) -> Path | None:
    """Directory with the installed C parts (gpucr.so and the programs), or None when there is no Makefile.

    Raises LabError with the end of the compiler's output.
    """
    if not (source / "Makefile").is_file():
        return None
    result = cache / "plugin" / sources_digest(source, rootfs)
    if result.is_dir():
        os.utime(result)
        return result
    result.parent.mkdir(parents=True, exist_ok=True)
    # Not by a process number: those of boxes, which share the cache, are alike.
    work = Path(tempfile.mkdtemp(prefix="building.", dir=result.parent))
    try:
        make(source, rootfs, work, _INSTALL)
        installed = work / "out/usr/lib/gpucr"
        if not installed.is_dir():
            raise LabError(reason="spank_plugin: `make install` put nothing into /usr/lib/gpucr")
        try:
            installed.rename(result)
        except OSError:
            if not result.is_dir():  # else another lab was quicker with the same
                raise
        _forget_old(result.parent)
    except ToolFailed as error:
        raise LabError(reason=f"spank_plugin could not be built (--no-plugin goes without):\n{error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return result


def _forget_old(builds: Path) -> None:
    """Builds that nobody has made or wanted for a day; younger ones may be another checkout's, or half done."""
    for path in builds.iterdir():
        if path.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(path, ignore_errors=True)


def install(built: Path | None, target: Path) -> bool:
    """Make `target` (bind-mounted in every node as /usr/lib/gpucr) equal to a build; True when something
    changed.

    Files are replaced by rename: a program that runs keeps its own, and a bind mount of the directory shows
    the new one.
    """
    wanted = {path.name: path for path in built.iterdir() if path.is_file()} if built else {}
    changed = False
    for name, path in wanted.items():
        there = target / name
        if there.exists() and there.read_bytes() == path.read_bytes():
            continue
        fresh = target / f".{name}.new"
        shutil.copy2(path, fresh)
        fresh.rename(there)
        changed = True
    for path in target.iterdir():
        if path.name not in wanted:
            path.unlink()
            changed = True
    return changed
