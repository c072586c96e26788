"""What the trials of dumps and restores share: the tree, code that is altered for workers, and the frame of a trial. A
trial runs inside the root file system of `scripts/measure_image`, and says a JSON object for each case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.lab import image_bench as bench
from gpucr_hpc.lab import image_tree
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.proc import clean_env

PLACE = Path("/bench/work/tree")
PROGRAM = Path("/src/tests/cluster/fill_program.py")
LIMIT_S = 60


class Tree(image_tree.Tree):
    def __init__(self) -> None:
        super().__init__("fill", 0)
        self.out = PLACE / "main"

    def _arguments(self) -> list[str]:
        return [str(PLACE), str(self.out)]

    def programs(self) -> list[int]:
        assert self.capsule is not None
        return [p.pid for p in namespace_processes(self.capsule.init_pid) if p.name == "python3"]

    def sums(self) -> dict[str, Any]:
        """What each process says of its memory now."""
        for path in PLACE.glob("*.sum"):
            path.unlink()
        for pid in self.programs():
            os.kill(pid, signal.SIGUSR2)
        wait_until(lambda: len(list(PLACE.glob("*.sum"))) == 2, LIMIT_S, "checksums")
        return {path.name: json.loads(path.read_text()) for path in PLACE.glob("*.sum")}

    def memory(self) -> dict[str, int]:
        """Bytes that the tree has, by smaps."""
        total = {"Rss": 0, "Pss": 0, "Private_Dirty": 0, "AnonHugePages": 0, "Locked": 0}
        for pid in self.programs():
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in total:
                    total[name] += int(rest.split()[0]) * 1024
        return total

    def mappings(self) -> list[list[str]]:
        """Addresses, permissions and flags of the mappings."""
        found = []
        for pid in self.programs():
            head = ""
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                if "-" in line.split(maxsplit=1)[0]:
                    head = " ".join(line.split(maxsplit=5)[:2])
                elif line.startswith("VmFlags:"):
                    found.append([head, *sorted(set(line.split()[1:]) - {"sd"})])
        return sorted(found)


@contextlib.asynccontextmanager
async def standing() -> AsyncIterator[tuple[Tree, bench.Ours]]:
    """The tree at work, and what dumps it."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    os.chown(PLACE, image_tree.UID, image_tree.UID)
    shutil.copy(PROGRAM, "/bench/program.py")
    tree, ours = Tree(), bench.Ours()
    await tree.start()
    try:
        yield tree, ours
    finally:
        with contextlib.suppress(Exception):
            await tree.end()


@contextlib.contextmanager
def altered(module: str, change: Callable[[str], str]) -> Iterator[None]:
    """Workers import a copy of the package in which one file is another."""
    shadow = Path("/bench/shadow")
    shutil.copytree("/src/gpucr_hpc", shadow / "gpucr_hpc", dirs_exist_ok=True)
    file = shadow / module
    text = change(file.read_text())
    assert text != file.read_text()
    file.write_text(text)
    kept = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = f"{shadow}:{kept}"
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = kept


def end_copiers() -> None:
    """Kill each gpucr-copier that this process has started; there must be one."""
    found = [int(status.parent.name) for status in Path("/proc").glob("[0-9]*/status") if _is_copier(status)]
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def _is_copier(status: Path) -> bool:
    try:
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
    except OSError:  # it has ended
        return False
    return fields["Name"] == "gpucr-copier" and int(fields["PPid"]) == os.getpid()


def say(name: str, said: dict[str, Any]) -> None:
    print(json.dumps({"case": name, **said}), flush=True)


def main(trial: Callable[[], Coroutine[Any, Any, None]]) -> None:
    os.environ["PATH"] = clean_env()["PATH"]
    image_tree.prepare()
    asyncio.run(trial())
