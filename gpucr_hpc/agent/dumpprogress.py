"""How far a dump is: the worker reads the image from CRIU's pipes, and the kernel counts what it reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DumpProgress:
    """worker_pid: who reads. of_bytes: resident memory of the tree, about what is to be read. beside_bytes: tells what
    gpucr-copier has read for it."""

    worker_pid: int
    of_bytes: int
    beside_bytes: Callable[[], int] = int
    _began: float = field(default_factory=time.monotonic)

    def as_dict(self) -> dict[str, Any]:
        """bytes read and expected, and left_s: seconds at the speed so far, None at the very start."""
        done = min(read_bytes(self.worker_pid) + self.beside_bytes(), self.of_bytes)
        took_s = time.monotonic() - self._began
        left = (self.of_bytes - done) * took_s / done if done > self.of_bytes // 100 else None
        return {"bytes": done, "of_bytes": self.of_bytes, "left_s": None if left is None else round(left, 1)}


def read_bytes(pid: int) -> int:
    """Bytes that a process has read so far, from files and pipes; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))
    except (OSError, StopIteration):
        return 0
