"""A program whose threads count, each in a file of its name, and which of them run."""

from __future__ import annotations

import time
from pathlib import Path

PROGRAM = """
import threading, time
def count(name):
    with open(name, "a", buffering=1) as file:
        while True:
            file.write("x")
            file.flush()
            time.sleep(0.002)
for name in NAMES:
    threading.Thread(target=count, args=(name,), daemon=True).start()
count("main")
"""


class Counting:
    """`program` is to run in this folder; beside "main", threads of these names, the oldest first."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.names = ("main", *names)
        self.program = f"NAMES = {names}\n{PROGRAM}"

    def wait(self) -> None:
        """Until all of them count."""
        end = time.monotonic() + 20
        while not all((self.folder / name).exists() for name in self.names):
            assert time.monotonic() < end
            time.sleep(0.01)

    def sizes(self) -> dict[str, int]:
        return {name: (self.folder / name).stat().st_size for name in self.names}

    def moving(self) -> set[str]:
        """Names of the threads that run."""
        before = self.sizes()
        time.sleep(0.2)
        return {name for name, size in self.sizes().items() if size > before[name]}
