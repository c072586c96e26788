"""Chunks of a new image into its packs, sealed; each only once.

Who calls: parts, on several threads; writer, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

from gpucr_hpc.errors import GpucrError, ImageError
from gpucr_hpc.image import layout, native
from gpucr_hpc.image.base import MAX_KNOWN
from gpucr_hpc.image.buffers import Buffer, PerThread, copy
from gpucr_hpc.image.chunkid import ID_BYTES, ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES, TAG_BYTES, ChunkKind, Origin, is_zero, seal, squeeze
from gpucr_hpc.image.files import PlacedFile

_ZERO_TAG, _ZERO_ID = bytes(TAG_BYTES), bytes(ID_BYTES)


class Piece(NamedTuple):
    """A chunk's plain bytes: `first` of a buffer from `at` on, then `size` - `first` at the beginning of another."""

    buffer: Buffer
    at: int
    first: int
    size: int
    rest: Buffer


def _zero(size: int) -> bytes:
    return layout.RECORD.pack(0, 0, size, 0, 0, ChunkKind.ZERO, _ZERO_TAG, _ZERO_ID)


class Packs:
    """The files of an image. heads: name and first bytes of each pack. known: records of chunks that need not be stored
    again, by id; those that are stored are added. part_bytes: of what `store` gets, at most. Raises StoreFull,
    StoreError."""

    def __init__(
        self,
        create: Callable[[str], BinaryIO],
        heads: Mapping[str, bytes],
        origin: Origin,
        ids: ChunkIds,
        known: dict[bytes, bytes],
        part_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.origin = origin
        self._create, self._ids, self._known = create, ids, known
        self._lock = threading.Lock()
        self._files: list[PlacedFile] = []
        self.ends: list[int] = []
        self.bytes_stored = 0
        room = part_bytes + CHUNK_BYTES  # a part, and what of its first chunk was in the part before
        self._packed, self._sealed = PerThread(lambda: Buffer(room)), PerThread(lambda: Buffer(room))
        self._joint = PerThread(lambda: Buffer(CHUNK_BYTES))
        self._tables = PerThread(native.Table)
        try:
            for name, head in heads.items():
                self.add(name, head)
        except BaseException:
            self.close()
            raise
        self._writers = [0] * len(heads)
        self._turn = 0

    def add(self, name: str, data: bytes) -> None:
        """A file more that begins with `data`."""
        file = PlacedFile(self._create(name), name)
        self._files.append(file)
        file.write_at(data, 0)
        self.ends.append(len(data))
        self.bytes_stored += len(data)

    @property
    def mark_key(self) -> bytes:
        """Of the marks that `is_chunk` takes."""
        return self._ids.mark_key

    def is_chunk(self, record: bytes, mark: bytes, size: int) -> bool:
        """Whether `size` bytes with this mark, which is zero for what is zero, are the chunk of a record."""
        _, _, plain, _, _, kind, _, name = layout.RECORD.unpack(record)
        same = mark == _ZERO_TAG if kind == ChunkKind.ZERO else self._ids.name(mark) == name
        return bool(same and plain == size)

    def store(self, pieces: Sequence[Piece]) -> bytes:
        """The records of at most MAX_CHUNKS chunks, which are in the store when this returns, or were before."""
        if native.library is None:
            return b"".join([self._store_one(*self._joined(piece)) for piece in pieces])
        return b"".join(self._store_all(native.library, pieces)) if pieces else b""

    def _joined(self, piece: Piece) -> tuple[Buffer, int, int]:
        buffer, at, first, size, rest = piece
        if first == size:
            return buffer, at, size
        joint = self._joint.get()
        copy(buffer, at, first, joint, 0)
        copy(rest, 0, size - first, joint, first)
        return joint, 0, size

    def _store_one(self, buffer: Buffer, at: int, size: int) -> bytes:
        if is_zero(buffer, at, size):
            return _zero(size)
        plain = buffer.view[at : at + size]
        name = self._ids.of(plain)
        known = self._known.get(name)
        if known is not None:
            return known
        packed = self._packed.get()
        length = squeeze(buffer, at, size, packed)
        kind = ChunkKind.LZ4 if length else ChunkKind.RAW
        payload = packed.view[:length] if length else plain
        length = len(payload)
        pack, offset = self._place(length)
        origin = self.origin
        place = origin.place(pack, offset, size, kind)
        sealed = seal(origin.cipher, origin.nonce(pack, offset), payload, place, self._sealed.get())
        self._files[pack].write_at(sealed[:length], offset)
        record = layout.RECORD.pack(offset, length, size, pack, 0, kind, bytes(sealed[length:]), name)
        self._stored(pack, length, {name: record})
        return record

    def _store_all(self, library: native.Native, pieces: Sequence[Piece]) -> list[bytes]:
        count, table = len(pieces), self._tables.get()
        for number, (buffer, at, first, size, rest) in enumerate(pieces):
            table.put(number, (buffer.address + at, rest.address, first, size, 0, ChunkKind.ZERO, 0, _ZERO_TAG))
        library.mark(self._ids.mark_key, table, count)
        names: list[bytes] = []
        fresh: dict[bytes, bytes] = {}
        others: list[int] = []
        rows = table.rows(count)
        for number, row in enumerate(rows):
            name = _ZERO_ID if row.kind == ChunkKind.ZERO else self._ids.name(row.tag)
            names.append(name)
            if row.kind == ChunkKind.ZERO or name in self._known or name in fresh:
                others.append(number)
            else:
                fresh[name] = b""
        if fresh:
            for number in others:
                table.put(number, rows[number]._replace(skip=1))
            packed, sealed = self._packed.get(), self._sealed.get()
            length = library.pack(table, count, packed.address, packed.size, self._joint.get().address)
            pack, offset = self._place(length)
            library.seal(self.origin.native_place(pack, offset), table, count, packed.address, sealed.address)
            self._files[pack].write_at(sealed.view[:length], offset)
            for name, row in zip(names, table.rows(count), strict=True):
                if not row.skip:
                    fresh[name] = layout.RECORD.pack(offset, row.length, row.size, pack, 0, row.kind, row.tag, name)
                    offset += row.length
            self._stored(pack, length, fresh)
        return [
            fresh.get(name) or (self._known[name] if name != _ZERO_ID else _zero(piece.size))
            for name, piece in zip(names, pieces, strict=True)
        ]

    def _stored(self, pack: int, length: int, records: Mapping[bytes, bytes]) -> None:
        """So many bytes are in a pack; records of chunks by id."""
        with self._lock:
            self._writers[pack] -= 1
            self.bytes_stored += length
            if len(self._known) < MAX_KNOWN:
                self._known.update(records)

    def _place(self, length: int) -> tuple[int, int]:
        """Pack and offset for so many bytes: where the fewest threads write, since the kernel lets one at a time write
        to a file; of several such packs each in turn."""
        with self._lock:
            count = len(self._writers)
            pack = min(range(count), key=lambda number: (self._writers[number], (number - self._turn) % count))
            self._turn = pack + 1
            self._writers[pack] += 1
            offset = self.ends[pack]
            self.ends[pack] += length
        return pack, offset

    def sync(self) -> None:
        """Have everything on stable storage; every file has the size that was written."""
        sizes = [file.size() for file in self._files]
        if sizes != self.ends:
            raise ImageError(path=self._files[0].path, reason=f"sizes {sizes}, written {self.ends}")
        with ThreadPoolExecutor(len(self._files)) as threads:
            list(threads.map(PlacedFile.sync, self._files))

    def close(self) -> None:
        """Close all files, then raise the first failure; twice is fine."""
        failure: GpucrError | None = None
        for file in self._files:
            try:
                file.close()
            except GpucrError as error:
                failure = failure or error
        if failure:
            raise failure
