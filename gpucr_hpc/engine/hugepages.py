"""Huge pages for the GPU memory of a job that comes back, where the kernel gives them only to who asks.

Who calls: the worker, when it serves an image. A GPU's driver keeps the memory of its card in private anonymous memory
until it has copied it back, and does not ask. In small pages the fill and the driver's copy take longer; such memory is
full, so huge pages take no more of it. CRIU gives each mapping the advice that its image has (images/vma.proto, madv).
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Sequence, Set
from pathlib import Path

from gpucr_hpc.engine import protobuf
from gpucr_hpc.engine.fillplan import Part, Range
from gpucr_hpc.errors import ImageError
from gpucr_hpc.image.reader import ImageReader

#: Smaller mappings are left alone: the program's own are among them.
LEAST_BYTES = 64 << 20
#: So much of a mapping may be empty.
HOLES = 1 / 32

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VMAS, _START, _END, _MADV = 14, 1, 2, 9
_HUGEPAGE, _NOHUGEPAGE = 1 << 14, 1 << 15  # MADV_HUGEPAGE, MADV_NOHUGEPAGE


def wanted() -> bool:
    """Whether this kernel gives huge pages to mappings with the advice, and to no others."""
    try:
        return "[madvise]" in _SWITCH.read_text()
    except OSError:
        return False


def advised(reader: ImageReader, parts: Sequence[Part]) -> dict[str, bytes]:
    """CRIU's files of the mappings in which large full ones have the advice, by name. Raises ImageError."""
    found = {}
    for part in parts:
        full = {place for place in part.mappings if place[1] - place[0] >= LEAST_BYTES and _is_full(place, part)}
        if full:
            name = f"mm-{part.pid}.img"
            found[name] = _with_advice(reader.read(name), full, name)
    return found


def _is_full(mapping: Range, part: Part) -> bool:
    start, end = mapping
    first = bisect.bisect_right(part.places, start, key=lambda place: place[1] + place[2])
    present = 0
    for _, address, size in itertools.islice(part.places, first, None):
        if address >= end:
            break
        present += min(address + size, end) - max(address, start)
    return present >= (end - start) * (1 - HOLES)


def _with_advice(data: bytes, full: Set[Range], name: str) -> bytes:
    def change(vma: bytes) -> bytes:
        message = protobuf.fields(vma)
        place = protobuf.number(message, _START), protobuf.number(message, _END)
        madv = protobuf.number(message, _MADV) or 0
        if place not in full or madv & (_HUGEPAGE | _NOHUGEPAGE):
            return vma
        return protobuf.with_number(vma, _MADV, madv | _HUGEPAGE)

    try:
        messages = [protobuf.changed(message, _VMAS, change) for message in protobuf.raw_messages(data)]
    except (IndexError, struct.error):
        raise ImageError(path=name, reason="cannot be read") from None
    return data[: protobuf.MAGIC_BYTES] + b"".join(map(protobuf.framed, messages))
