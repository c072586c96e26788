"""Files that several nodes of a job write to.

The nodes freeze one after the other, so each has seen another size of such a file, and CRIU on each takes a file of
another size for one that was changed. The size that counts is the one that the last of its writers saw after its own
freeze, the largest. It goes into what every node remembers of the file, by which it is cut back at a restore, and into
what CRIU is told.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpucr_hpc.engine import protobuf
from gpucr_hpc.errors import ImageError
from gpucr_hpc.image.reader import ImageReader

_FILES = "files.img"
# images/fdinfo.proto, file_entry {1: type, 3: reg}; images/regfile.proto, reg_file_entry {6: name, 8: size}
_REG, _NAME, _SIZE = 3, 6, 8


def agree(ranks: Sequence[Iterable[dict[str, Any]]]) -> None:
    """ranks: what each node remembers of its files (openfiles.OpenFile). Those of the same identity get one size, and
    are marked as shared."""
    nodes: dict[tuple[str, str], set[int]] = {}
    largest: dict[tuple[str, str], int] = {}
    for rank, files in enumerate(ranks):
        for file in files:
            key = (file["path"], file["identity"])
            nodes.setdefault(key, set()).add(rank)
            largest[key] = max(file["size_bytes"], largest.get(key, 0))
    for files in ranks:
        for file in files:
            key = (file["path"], file["identity"])
            if len(nodes[key]) > 1:
                file["size_bytes"], file["shared"] = largest[key], True


def fitted(reader: ImageReader, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """CRIU's table of files with these sizes in bytes by path; nothing without any. Raises ImageError."""
    if not sizes or _FILES not in reader.names():
        return {}
    return {_FILES: in_table(reader.read(_FILES), sizes)}


def in_table(data: bytes, sizes: Mapping[str, int]) -> bytes:
    """The same of the table itself."""
    out = [data[: protobuf.MAGIC_BYTES]]
    try:
        for message in protobuf.raw_messages(data):
            for entry in protobuf.fields(message).get(_REG, ()):
                if not isinstance(entry, bytes):
                    raise IndexError("no message")
                (name,) = protobuf.fields(entry).get(_NAME, [b""])
                size = sizes.get(name.decode(errors="surrogateescape")) if isinstance(name, bytes) else None
                if size is not None:
                    message = protobuf.replaced(message, _REG, protobuf.replaced(entry, _SIZE, size))
            out.append(protobuf.framed(message))
    except (IndexError, ValueError, struct.error):
        raise ImageError(path=_FILES, reason="cannot be read") from None
    return b"".join(out)
