"""What holds for every test: it leaves the process of the tests as it was."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A time limit for a single example fails on a busy machine, whatever is tested.
settings.register_profile("any load", deadline=None)
settings.load_profile("any load")


def _process() -> dict[str, object]:
    """What a test could change and another one would stumble over."""
    status = Path("/proc/self/status").read_text()
    # pytest itself notes the running test in the environment.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {
        "umask": re.findall(r"^Umask:\s*(\d+)$", status, re.MULTILINE),
        "users": re.findall(r"^[UG]id:\s*(.*)$", status, re.MULTILINE),
        "directory": os.getcwd(),
        "environment": environment,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    """umask, users, working directory, environment, signal handlers and mask."""
    before = _process()
    yield
    after = _process()
    changed = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    assert not changed, f"the test changed its process: {changed}"
