"""CRIU's images of a process tree, as far as a restore of ours looks into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from criu_image import PAGE, image, message

PLAIN = {5: 3, 6: 0x22, 7: 0x201}  # prot, flags, status of a private anonymous mapping


@dataclass
class Mapping:
    """A mapping with the pages that are in the image, by number of the page."""

    start: int
    pages: int
    content: dict[int, bytes] = field(default_factory=dict)
    kind: dict[int, int] = field(default_factory=lambda: PLAIN)

    @property
    def end(self) -> int:
        return self.start + self.pages * PAGE


@dataclass
class Process:
    pid: int
    parent: int
    mappings: Sequence[Mapping]
    rseq: int = 0

    def memory(self) -> dict[int, bytes]:
        """Pages by address."""
        return {m.start + n * PAGE: data for m in self.mappings for n, data in sorted(m.content.items())}


def runs_of(addresses: Sequence[int]) -> list[tuple[int, int]]:
    """(address, pages) of neighbours in ascending addresses."""
    runs: list[tuple[int, int]] = []
    for address in addresses:
        if runs and runs[-1][0] + runs[-1][1] * PAGE == address:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((address, 1))
    return runs


def files_of(processes: Sequence[Process]) -> dict[str, bytes]:
    """What a dump writes."""
    files = {"pstree.img": image(*(message({1: p.pid, 2: p.parent, 3: 1, 4: 1, 5: p.pid}) for p in processes))}
    for number, process in enumerate(processes, 1):
        mappings = [message({1: m.start, 2: m.end, 3: 0, 4: 0, **m.kind, 8: 1}) for m in process.mappings]
        files[f"mm-{process.pid}.img"] = image(message({1: 1, 12: 7, 14: mappings, 15: 1}))
        thread: dict[int, int | bytes | list[bytes]] = {1: 0, 2: 24}
        if process.rseq:
            thread[15] = message({1: process.rseq, 2: 32, 3: 0x53053053})
        core = message({1: 1, 2: message({1: 0}), 3: message({1: 1, 6: b"name"}), 5: message(thread)})
        files[f"core-{process.pid}.img"] = image(core)
        memory = process.memory()
        entries = [message({1: at, 2: 0, 4: 4, 5: count}) for at, count in runs_of(list(memory))]
        files[f"pagemap-{process.pid}.img"] = image(message({1: number}), *entries)
        files[f"pages-{number}.img"] = b"".join(memory.values())
    return files
