"""Waiting for a condition without fixed sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpucr_hpc.errors import LabError

T = TypeVar("T")
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.2


def wait_until(condition: Callable[[], T], timeout_s: float, what: str | Callable[[], str]) -> T:
    """Return the first true value of condition(); LabError with `what`, or what it says then, when there was none
    within timeout_s.

    Pauses grow from 10 to 200 ms. A condition that can no longer come true should raise by itself.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        value = condition()
        if value:
            return value
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            wanted = what if isinstance(what, str) else what()
            raise LabError(reason=f"waited {timeout_s:g} s in vain for {wanted}")
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
