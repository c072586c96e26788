"""What `scripts/lab_bundle` leaves of the lab's root file system."""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from gpucr_hpc.lab.recipe import CUSTOMIZE

SCRIPT = Path(__file__).parents[3] / "scripts/lab_bundle"


@pytest.fixture
def bundle() -> Any:
    spec = spec_from_loader("lab_bundle", SourceFileLoader("lab_bundle", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_product_s_own_command_stays(tmp_path: Path, bundle: Any) -> None:
    """Users of the lab give it in every node; compilers go."""
    assert '"$root/usr/bin/gpucr"' in CUSTOMIZE
    rootfs = tmp_path / "rootfs"
    for name in ("usr/bin/gpucr", "usr/bin/sbatch", "usr/bin/gcc", "usr/sbin/slurmd", f"{bundle.LIBRARIES}/libc.a"):
        path = rootfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
    bundle.reduce(rootfs, tmp_path / "root")
    left = {
        str(Path(folder, name).relative_to(tmp_path / "root"))
        for folder, _, names in os.walk(tmp_path / "root")
        for name in names
    }
    assert left == {"usr/bin/gpucr", "usr/bin/sbatch", "usr/sbin/slurmd"}
