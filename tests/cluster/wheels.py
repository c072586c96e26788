"""Python packages that Debian does not have, or builds for another MPI: wheels from the package index, fetched once.

Run as a program all are fetched before the tests, which may have no way out to a network (gpucr_hpc.lab.box).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gpucr_hpc.lab.cluster import Lab

# mpi4py's wheel finds its MPI at run time; Debian's is built for Open MPI.
NAMES = ("openmm", "mpi4py")


def fetched(lab: Lab, name: str) -> Path:
    """A package's wheel for the lab's Python, in the lab's cache."""
    version = os.readlink(lab.build() / "usr/bin/python3").removeprefix("python")
    wheels = lab.cache / "wheels" / version
    if not list(wheels.glob(_pattern(name))):
        fresh = wheels.with_name(f"{version}.{name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(fresh)]
        subprocess.run([*argv, "--python-version", version, name], check=True, stdin=subprocess.DEVNULL)
        (wheel,) = fresh.glob(_pattern(name))
        wheels.mkdir(exist_ok=True)
        wheel.rename(wheels / wheel.name)
        fresh.rmdir()
    (wheel,) = wheels.glob(_pattern(name))
    return wheel


def _pattern(name: str) -> str:
    """Of the file's name, which may be written in capitals."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in name) + "-*.whl"


def unpacked(lab: Lab, name: str) -> str:
    """Its directory on what the nodes share, for PYTHONPATH; the last step is the rename."""
    wheel = fetched(lab, name)
    target = lab.state / "shared/python" / wheel.stem
    if not target.is_dir():
        half = target.with_name(f"{target.name}.new")
        shutil.rmtree(half, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(half)
        for directory, _, names in os.walk(half):
            os.chmod(directory, 0o755)
            for file in names:
                os.chmod(Path(directory, file), 0o644)
        target.parent.chmod(0o755)
        half.rename(target)
    return f"/shared/python/{wheel.stem}"


if __name__ == "__main__":
    for package in NAMES:
        print(fetched(Lab(), package))
