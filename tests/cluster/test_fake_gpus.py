"""GPU jobs through the agent's own code and CRIU, with a driver that has no card and breaks as it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases(run_trial: Callable[[str], dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What came of each case (gpu_trial.py)."""
    return run_trial("gpu_trial")


@pytest.mark.parametrize("name", ["fake_all", "fake_threads", "fake_copies"])
def test_a_job_runs_on_whatever_breaks_and_is_moved(cases: dict[str, dict[str, Any]], name: str) -> None:
    assert cases[name]["failed"] == ""


def test_memory_was_sealed_while_the_driver_copied(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["fake_copies"]["found"]
    assert found["moves"] == 5
    assert found["sealed_early_mib"] > 192
