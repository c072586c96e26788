"""The dumped holder comes back under another number, so that the new holder can have its own.

The holder is the parent of the job's orphans. It is new in every capsule, and must live when CRIU restores the dumped
one: under another number it would change what getppid(2) says in every orphan. So the dumped one, which is sent away
soon, gets another: in `pstree.img`, and in the names of its files (criu/image-desc.c). Nothing else of CRIU's has the
number of a process that owns nothing but descriptors 0, 1, 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpucr_hpc.engine import protobuf
from gpucr_hpc.errors import ImageError
from gpucr_hpc.image.reader import ImageReader

_PSTREE = "pstree.img"
# Of these the number is a process; others ("fdinfo-2.img", "pages-2.img") count tables and mappings.
_OF_PROCESS = re.compile(
    r"(core|mm|fs|ids|pagemap|creds|sigacts|signal-s|signal-p|itimers|posix-timers|rlimit)-([0-9]+)\.img"
)


@dataclass(frozen=True)
class Renumbered:
    """What CRIU gets in place of the image's: names of files (asked for, in the image), and the tree."""

    names: dict[str, str]
    tree: dict[str, bytes]


def renumber(reader: ImageReader, old: int, new: int) -> Renumbered:
    """Process `old` as `new`, a number that nothing in the image has. Raises ImageError."""
    if old == new or _PSTREE not in reader.names():
        return Renumbered({}, {})
    found = [match for match in map(_OF_PROCESS.fullmatch, reader.names()) if match and int(match[2]) == old]
    names = {f"{match[1]}-{new}.img": match[0] for match in found}
    return Renumbered(names, {_PSTREE: in_tree(reader.read(_PSTREE), old, new)})


def in_tree(data: bytes, old: int, new: int) -> bytes:
    """images/pstree.proto {1: pid, 2: ppid, 3: pgid, 4: sid, 5: threads}: each of them that is `old` is `new`."""
    out = [data[: protobuf.MAGIC_BYTES]]
    try:
        for message in protobuf.messages(data, _PSTREE):
            pairs = [(field, value) for field, values in message.items() for value in values]
            out.append(protobuf.encode_pairs((f, new if f <= 5 and value == old else value) for f, value in pairs))
    except IndexError:
        raise ImageError(path=_PSTREE, reason="cannot be read") from None
    return b"".join(out)
