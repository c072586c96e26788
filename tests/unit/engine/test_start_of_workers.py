"""What the worker processes load before they do anything: each checkpoint and each restore waits for their start."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["gpucr_hpc.engine.worker", "gpucr_hpc.engine.cuda.worker"])
def test_nothing_that_only_the_agent_needs(module: str):
    """pyroute2 alone takes as long as all the rest."""
    text = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & {"pyroute2", "gpucr_hpc.capsule.network", "rich", "gpucr_hpc.slurm"}
