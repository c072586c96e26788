"""Fault points: places where a test makes the agent die, hang or fail.

They do nothing unless the agent was started with GPUCR_FAULT_FILE in its environment and that file holds the
point's name and an action, such as `published kill`. The file is removed before the action: it happens once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from gpucr_hpc.errors import GpucrError

VARIABLE = "GPUCR_FAULT_FILE"


def reach(point: str) -> None:
    """Act if this point is armed: `kill` ends this process as SIGKILL does, `hang` stops it for good with its
    event loop, `fail` raises GpucrError."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        name, _, action = Path(path).read_text().strip().rpartition(" ")
        if name != point:
            return
        Path(path).unlink()
    except FileNotFoundError:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        while True:
            time.sleep(3600)
    raise GpucrError(reason=f"fault point {point}")
