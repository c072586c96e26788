"""The steps of many chunks in one call of C, for threads that work side by side.

Who calls: parts, packs and reader. Python's lock is given away and fetched again for each step of each chunk otherwise,
and with eight threads that is what they wait for. libgpucr_chunks.so (spank_plugin/chunks.c) takes the same steps;
where it is not installed, `library` is None, and `cutting` and `chunks` do them, with the same result.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpucr_hpc.errors import ImageError

LIBRARY = Path("/usr/lib/gpucr/libgpucr_chunks.so")
_VERSION = 3
# On some processors older ones encrypt at half the speed of the package cryptography's; with few processors that costs
# more than Python's lock.
_FAST_OPENSSL = 0x30500000
_MANY_PROCESSORS = 4
#: Chunks in one table, at most: those of 32 pages in 4 MiB, and two more.
MAX_CHUNKS = 34
_ENDS = MAX_CHUNKS + 2

# struct chunk, struct place, struct opening and struct span of chunks.c
_CHUNK = struct.Struct("=QQIIIBB2x16s")
_PLACE = struct.Struct("=32sQHHH128s2x")
_MAX_NAME_BYTES = 128
_OPENING = struct.Struct("=7Q")
_SPAN = struct.Struct("=QQQ")
TAG_BYTES = 16

#: What `Native.open` found other than a chunk; a positive number is the error number of the read.
SHORT, FORGED, NOT_EXPANDED = -1, -2, -3


class Row(NamedTuple):
    """A chunk in a table. first: so many of its bytes are at `address`, the others at `rest`. skip: nothing is to be
    done with it. tag: what `mark` found, then what `seal` made, or what `open` is to find."""

    address: int
    rest: int
    first: int
    size: int
    length: int
    kind: int
    skip: int
    tag: bytes


class Table:
    """Chunks that C works on."""

    __slots__ = ("_hold", "address")

    def __init__(self) -> None:
        self._hold = bytearray(_CHUNK.size * MAX_CHUNKS)
        self.address = ctypes.addressof((ctypes.c_char * len(self._hold)).from_buffer(self._hold))

    def put(self, number: int, row: tuple[int, int, int, int, int, int, int, bytes]) -> None:
        """Set one row."""
        _CHUNK.pack_into(self._hold, number * _CHUNK.size, *row)

    def rows(self, count: int) -> list[Row]:
        """The first `count` rows as they are now."""
        return list(map(Row._make, _CHUNK.iter_unpack(memoryview(self._hold)[: count * _CHUNK.size])))


class Opening:
    """What chunks are opened with, by one thread at a time. sources: `place` of each; files: descriptors of the packs
    of each, by their numbers; sealed, opened: room for a chunk. Without mark_key there are no marks."""

    def __init__(
        self,
        sources: Sequence[bytes],
        files: Sequence[Mapping[int, int]],
        mark_key: bytes | None,
        sealed: int,
        opened: int,
    ) -> None:
        packs = max((number + 1 for known in files for number in known), default=0)
        fds = [known.get(number, -1) for known in files for number in range(packs)]
        self._hold = (
            ctypes.create_string_buffer(b"".join(sources)),
            (ctypes.c_int * len(fds))(*fds),
            None if mark_key is None else ctypes.create_string_buffer(mark_key, len(mark_key)),
        )
        places, numbers, key = (0 if part is None else ctypes.addressof(part) for part in self._hold)
        self._opening = ctypes.create_string_buffer(
            _OPENING.pack(places, numbers, len(sources), packs, key, sealed, opened), _OPENING.size
        )
        self.address = ctypes.addressof(self._opening)


def place(key: bytes, offset: int, rank: int, pack: int, checkpoint: bytes) -> bytes:
    """Where chunks lie and what binds them to it."""
    if len(checkpoint) > _MAX_NAME_BYTES:
        raise ValueError(f"a checkpoint's name has {len(checkpoint)} bytes")
    return _PLACE.pack(key, offset, rank, pack, len(checkpoint), checkpoint)


class Native:
    """The library; `path`: its file. Any thread may call. openssl: the version's number. Raises OSError when it cannot
    be loaded, or is of another version."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if library.gpucr_chunks_version() != _VERSION:
            raise OSError(f"{path} is of another version: make -C spank_plugin install")
        library.gpucr_chunks_openssl.restype = ctypes.c_ulong
        self.openssl = int(library.gpucr_chunks_openssl())
        self._mark, self._pack = library.gpucr_chunks_mark, library.gpucr_chunks_pack
        self._seal, self._open = library.gpucr_chunks_seal, library.gpucr_chunks_open
        self._cut = library.gpucr_chunks_cut
        self._cut.argtypes, self._cut.restype = (address, size, size, address, address), size
        self._mark.argtypes = (ctypes.c_char_p, address, size)
        self._pack.argtypes, self._pack.restype = (address, size, address, size, address), size
        self._seal.argtypes = (ctypes.c_char_p, address, size, address, address)
        self._open.argtypes = (address, ctypes.c_char_p, address, address, address)
        self._put = library.gpucr_chunks_put
        self._put.argtypes = (number, ctypes.c_char_p, size, address)

    def cut(self, address: int, pages: int, since: int, before: int) -> tuple[list[int], int]:
        """As cutting.cuts does with cutting.marks: numbers of pages, and 0 or 1 for the last page's mark."""
        ends, empty = (ctypes.c_uint32 * _ENDS)(), ctypes.c_int(not before)
        count = self._cut(address, pages, since, ctypes.byref(empty), ends)
        return ends[:count], int(not empty.value)

    def mark(self, key: bytes, table: Table, count: int) -> None:
        """Set kind (ZERO, RAW) and tag (its mark, chunkid.ChunkIds.name) of chunks."""
        self._check(self._mark(key, table.address, count))

    def pack(self, table: Table, count: int, room: int, size: int, joint: int) -> int:
        """Put LZ4 blocks, where that pays, at `room`; sets kind and length. joint: room for a chunk. Bytes that are to
        be stored."""
        return int(self._pack(table.address, count, room, size, joint))

    def seal(self, where: bytes, table: Table, count: int, packed: int, room: int) -> None:
        """Encrypt at `room`, one after another, what lies at its place or, packed, at `packed`; sets tag."""
        self._check(self._seal(where, table.address, count, packed, room))

    def open(self, opening: Opening, records: bytes, count: int, room: int) -> tuple[int, list[bytes]]:
        """Open chunks, none of them ZERO, by their records, until one fails: 0 or what was wrong, and the marks of
        those that were opened, whose plain bytes are one after another at `room`."""
        number = ctypes.c_size_t(count)
        marks = bytearray(count * TAG_BYTES)
        failed = self._open(opening.address, records, ctypes.byref(number), room, _address(marks))
        if failed not in (SHORT, FORGED, NOT_EXPANDED):
            self._check(min(failed, 0))
        return failed, [bytes(marks[at : at + TAG_BYTES]) for at in range(0, number.value * TAG_BYTES, TAG_BYTES)]

    def put(self, fd: int, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
        """Write memory (address, offset in the file, size): 0, or an error number or SHORT and the offset where."""
        failed = ctypes.c_uint64()
        data = b"".join(map(_SPAN.pack, *zip(*spans, strict=True))) if spans else b""
        return int(self._put(fd, data, len(spans), ctypes.byref(failed))), failed.value

    def _check(self, status: int) -> None:
        if status:
            raise ImageError(path=str(LIBRARY), reason="OpenSSL failed")


def _address(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


def load(path: Path = LIBRARY) -> tuple[Native | None, str]:
    """The library, or None and the reason: it cannot be used, or does not pay here, which begins with "OpenSSL"."""
    try:
        found = Native(path)
    except (OSError, AttributeError) as error:
        return None, str(error)
    processors = len(os.sched_getaffinity(0))
    if found.openssl >= _FAST_OPENSSL or processors >= _MANY_PROCESSORS:
        return found, ""
    return None, f"OpenSSL {found.openssl >> 28}.{found.openssl >> 20 & 255} is slow for {processors} processors"


library, reason = load()
