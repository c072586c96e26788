"""Chunks of a new image into its packs, sealed; each only once.

Who calls: parts, on several threads; writer, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from gpucr_hpc.errors import GpucrError, ImageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.base import MAX_KNOWN
from gpucr_hpc.image.buffers import Buffer, PerThread
from gpucr_hpc.image.chunkid import ID_BYTES, ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES, TAG_BYTES, ChunkKind, Origin, is_zero, seal, squeeze
from gpucr_hpc.image.files import PlacedFile

_ZERO_TAG, _ZERO_ID = bytes(TAG_BYTES), bytes(ID_BYTES)


class Packs:
    """The files of an image. heads: name and first bytes of each pack. known: records of chunks that need not be stored
    again, by id; those that are stored are added. Raises StoreFull, StoreError."""

    def __init__(
        self,
        create: Callable[[str], BinaryIO],
        heads: Mapping[str, bytes],
        origin: Origin,
        ids: ChunkIds,
        known: dict[bytes, bytes],
    ) -> None:
        self.origin = origin
        self._create, self._ids, self._known = create, ids, known
        self._lock = threading.Lock()
        self._files: list[PlacedFile] = []
        self.ends: list[int] = []
        self.bytes_stored = 0
        self._packed, self._sealed = PerThread(CHUNK_BYTES), PerThread(CHUNK_BYTES + TAG_BYTES)
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

    def store(self, buffer: Buffer, at: int, size: int) -> bytes:
        """The record of a chunk that is in the store when this returns, or was there before."""
        if is_zero(buffer, at, size):
            return layout.RECORD.pack(0, 0, size, 0, 0, ChunkKind.ZERO, _ZERO_TAG, _ZERO_ID)
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
        with self._lock:
            self._writers[pack] -= 1
            self.bytes_stored += length
            if len(self._known) < MAX_KNOWN:
                self._known[name] = record
        return record

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
