"""OpenMM for the lab's Python. Debian does not have it: the wheel comes from the package index, once.

Run as a program it is fetched before the tests, which may have no way out to a network (gpucr_hpc.lab.box).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpucr_hpc.lab.cluster import Lab


def fetched(lab: Lab) -> Path:
    """The wheel in the lab's cache."""
    version = os.readlink(lab.build() / "usr/bin/python3").removeprefix("python")
    wheels = lab.cache / "wheels" / version
    if not list(wheels.glob("[Oo]pen[Mm][Mm]-*.whl")):
        fresh = wheels.with_name(f"{version}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(fresh)]
        subprocess.run([*argv, "--python-version", version, "openmm"], check=True, stdin=subprocess.DEVNULL)
        shutil.rmtree(wheels, ignore_errors=True)
        fresh.rename(wheels)
    (wheel,) = wheels.glob("[Oo]pen[Mm][Mm]-*.whl")
    return wheel


if __name__ == "__main__":
    print(fetched(Lab()))
