"""Builds the C parts against the headers of both supported Slurm series and runs their tests, in the lab's root file
system: `python3 -m gpucr_hpc.lab.check_plugin` (root). The host needs no compiler and no Slurm.

The static programs are left in spank_plugin/build, where tests of the capsule without Slurm look for them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from gpucr_hpc.errors import GpucrError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.lab.plugin import make

INCLUDES = {"26.05": "/usr/include", "24.11": "/opt/slurm-24.11/include"}


def check(source: Path, rootfs: Path, include: str, work: Path) -> str:
    """Build and test; what make said. Raises ToolFailed with the end of it."""
    arguments = ["-j2", "--output-sync", "B=/out", f"SLURM_INCLUDE={include}", "all", "check"]
    return make(source, rootfs, work, arguments).stdout


def main() -> int:
    """Both series, one after the other."""
    source = CHECKOUT / "spank_plugin"
    try:
        rootfs = Lab(say=lambda line: print(f"lab: {line}", flush=True)).build()
        with tempfile.TemporaryDirectory(prefix="gpucr-check-") as work:
            for series, include in INCLUDES.items():
                said = check(source, rootfs, include, Path(work) / "make")
                results = [line for line in said.splitlines() if "ok" in line.split() or "passed" in line]
                print(f"C parts, headers of Slurm {series}: make check passed", *results, sep="\n  ", flush=True)
            (source / "build").mkdir(exist_ok=True)
            for program in (Path(work) / "make/out").glob("gpucr-*"):
                fresh = source / "build" / f".{program.name}.new"
                shutil.copy2(program, fresh)
                fresh.rename(source / "build" / program.name)
    except GpucrError as error:
        print(f"check_plugin: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
