"""Streams of one image back out of its packs; nothing leaves before it was checked.

Who calls: restore, one thread per pipe that CRIU opens (copy_to_fd). The constructor does all checks that
need no chunk: sizes of all files against the signed manifest, headers, index, geometry. A chunk is checked by
its tag before any byte of it is written. Chunks are read ahead on a pool, AHEAD per stream.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from cryptography.exceptions import InvalidTag

from gpucr_hpc.errors import IntegrityError, ObjectMissing, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.chunks import (
    CHUNK_BYTES,
    INDEX_PACK,
    MAX_IMAGES,
    TAG_BYTES,
    ZEROS,
    ChunkKind,
    Place,
    nonce,
    unseal,
    unsqueeze,
)
from gpucr_hpc.image.files import PlacedFile, wait_for, widen_pipe
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.writer import default_workers
from gpucr_hpc.model import ImageEntry, PackEntry

#: Chunks of one stream that are read before they are asked for; also its memory in MiB.
AHEAD = 8

_Piece = tuple[memoryview, bytearray | None]


class ImageReader:
    """Reads one image; `open_` opens its files (Store.open of one checkpoint). Any thread may use it.

    entry comes from a manifest whose signature was checked. Raises IntegrityError and FormatUnknown with
    the name of the file, StoreError.
    """

    def __init__(
        self,
        open_: Callable[[str], BinaryIO],
        entry: ImageEntry,
        *,
        checkpoint: str,
        key: DataKey,
        workers: int | None = None,
    ) -> None:
        self._entry, self._checkpoint, self._rank = entry, checkpoint, entry.node_rank
        if self._rank >= MAX_IMAGES or not 1 <= len(entry.packs) < INDEX_PACK:
            raise UsageError(reason=f"image {self._rank}: node rank or number of packs is out of range")
        self._salt = bytes.fromhex(entry.salt)
        self._cipher = key.image_key(checkpoint, self._rank, self._salt)
        self._packs: list[PlacedFile] = []
        self._free: list[bytearray] = []
        self._scratch = threading.local()
        files: list[PlacedFile] = []
        try:
            for part in (*entry.packs, entry.index):
                files.append(self._open(open_, part))  # noqa: PERF401 - those before a failure are closed
            self._packs, index = files[:-1], files[-1]
            self._streams = self._read_index(index)
            index.close()
            self._check_packs()
        except BaseException:
            for file in files:
                file.close()
            raise
        self._pool = ThreadPoolExecutor(workers or default_workers(), thread_name_prefix=f"image-{self._rank}")

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the packs; twice is fine."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._packs:
            file.close()

    def names(self) -> list[str]:
        """Names of the streams, in the order in which they were opened for writing."""
        return list(self._streams)

    def size(self, name: str) -> int:
        """Plain size in bytes. Raises UsageError for an unknown name."""
        return self._stream(name).size_bytes

    def read(self, name: str) -> bytes:
        """A whole (small) stream."""
        return b"".join([bytes(piece) for piece in self._pieces(self._stream(name))])

    def copy_to_fd(self, name: str, fd: int, patches: Iterable[tuple[int, bytes]] = ()) -> int:
        """Write a stream to a pipe or file; its size. The caller closes fd, which is the end of the stream.

        patches: offset and bytes that take the place of the stream's own.

        A damaged chunk raises IntegrityError before any byte of it is written. Raises BrokenPipeError when
        the other side has closed, OSError (of the descriptor), UsageError (no such stream).
        """
        stream = self._stream(name)
        widen_pipe(fd)
        position = 0
        for piece in self._pieces(stream):
            size = len(piece)
            piece = _patched(piece, position, patches)
            position += size
            while piece:
                try:
                    piece = piece[os.write(fd, piece) :]
                except BlockingIOError:
                    wait_for(fd, select.POLLOUT)
        return stream.size_bytes

    def verify(self, deep: bool = False) -> None:
        """Check the files' sizes again; deep: read and open every chunk. Raises IntegrityError."""
        for part, file in zip(self._entry.packs, self._packs, strict=True):
            self._check_size(part, file)
        if deep:
            for stream in self._streams.values():
                for _ in self._pieces(stream):
                    pass

    # --- opening ----------------------------------------------------------------------------------------

    def _open(self, open_: Callable[[str], BinaryIO], part: PackEntry) -> PlacedFile:
        try:
            file = PlacedFile(open_(part.name), part.name)
        except (FileNotFoundError, ObjectMissing):
            raise IntegrityError(path=part.name, reason="the file is missing") from None
        try:
            self._check_size(part, file)
        except BaseException:
            file.close()
            raise
        return file

    def _check_size(self, part: PackEntry, file: PlacedFile) -> None:
        found = file.size()
        if found != part.size_bytes:
            reason = f"has {found} bytes, the manifest says {part.size_bytes}"
            raise IntegrityError(path=part.name, reason=reason)

    def _read_index(self, file: PlacedFile) -> dict[str, layout.Stream]:
        path, size = file.path, self._entry.index.size_bytes
        start = layout.HEADER_BYTES + layout.INDEX_LENGTH.size
        if not start + TAG_BYTES <= size <= layout.MAX_INDEX_BYTES:
            raise IntegrityError(path=path, reason=f"an index cannot have {size} bytes")
        data = bytearray(size)
        if file.read_into(memoryview(data), 0) != size:
            raise IntegrityError(path=path, reason="became shorter while it was read")
        packs = len(self._packs)
        expected = layout.header(layout.INDEX_MAGIC, self._checkpoint, self._rank, packs, self._salt)
        layout.check_header(bytes(data[: layout.HEADER_BYTES]), expected, path)
        if hashlib.sha256(data).hexdigest() != self._entry.index.sha256:
            raise IntegrityError(path=path, reason="is not the file that the manifest names")
        try:
            place = b"gpucr-v1 index\0" + bytes(data[:start])
            packed = self._cipher.decrypt(nonce(self._rank, INDEX_PACK, 0), memoryview(data)[start:], place)
        except InvalidTag:
            raise IntegrityError(path=path, reason="the data key does not open it") from None
        (length,) = layout.INDEX_LENGTH.unpack_from(data, layout.HEADER_BYTES)
        return layout.decode_index(layout.inflate(memoryview(packed), length, path), path)

    def _check_packs(self) -> None:
        entry = self._entry
        tags = layout.check_geometry(self._streams, [pack.size_bytes for pack in entry.packs], entry.index.name)
        for number, (part, file) in enumerate(zip(entry.packs, self._packs, strict=True)):
            found = bytearray(layout.HEADER_BYTES)
            count = file.read_into(memoryview(found), 0)
            head = layout.header(layout.PACK_MAGIC, self._checkpoint, self._rank, number, self._salt)
            layout.check_header(bytes(found[:count]), head, part.name)
            if layout.pack_digest(head, tags[number]) != part.sha256:
                raise IntegrityError(path=part.name, reason="is not the pack that the index describes")
        plain = sum(stream.size_bytes for stream in self._streams.values())
        if plain != entry.bytes_plain or len(self._streams) != entry.streams:
            raise IntegrityError(path=entry.index.name, reason="does not hold what the manifest says")

    # --- chunks -----------------------------------------------------------------------------------------

    def _stream(self, name: str) -> layout.Stream:
        try:
            return self._streams[name]
        except KeyError:
            raise UsageError(reason=f"image {self._rank} has no stream {name!r}") from None

    def _pieces(self, stream: layout.Stream) -> Iterator[memoryview]:
        """Plain bytes chunk by chunk, in order; each is valid until the next is asked for."""
        place = Place(self._checkpoint, self._rank, stream.name)
        waiting: deque[Future[_Piece]] = deque()
        asked = 0
        try:
            for _ in range(len(stream)):
                while asked < len(stream) and len(waiting) < AHEAD:
                    waiting.append(self._pool.submit(self._fetch, stream, asked, place))
                    asked += 1
                piece, buffer = waiting.popleft().result()
                yield piece
                if buffer is not None and len(self._free) < 4 * AHEAD:
                    self._free.append(buffer)
        finally:
            for future in waiting:
                future.cancel()

    def _fetch(self, stream: layout.Stream, sequence: int, place: Place) -> _Piece:
        """On a worker: read, check, open and expand one chunk; the buffer to give back, if any."""
        chunk = stream.chunk(sequence)
        if chunk.kind == ChunkKind.ZERO:
            return memoryview(ZEROS)[: chunk.plain], None
        file = self._packs[chunk.pack]
        sealed, room = self._rooms()
        view = memoryview(sealed)[: chunk.stored + TAG_BYTES]
        if file.read_into(view[: chunk.stored], chunk.offset) != chunk.stored:
            raise IntegrityError(path=file.path, reason=f"ends inside the chunk at byte {chunk.offset}")
        view[chunk.stored :] = chunk.tag
        buffer = None
        if chunk.kind == ChunkKind.RAW:
            buffer = room = self._buffer()
        number = nonce(self._rank, chunk.pack, chunk.offset)
        opened = unseal(self._cipher, number, view, place.bind(sequence, chunk.plain, chunk.kind), room)
        if opened is None:
            reason = f"chunk {sequence} of stream {stream.name}, at byte {chunk.offset}, is not what was written"
            raise IntegrityError(path=file.path, reason=reason)
        if chunk.kind == ChunkKind.RAW:
            return opened, buffer
        try:
            return memoryview(unsqueeze(opened, chunk.plain)), None
        except ValueError as error:
            reason = f"chunk {sequence} of stream {stream.name} does not expand: {error}"
            raise IntegrityError(path=file.path, reason=reason) from None

    def _buffer(self) -> bytearray:
        try:
            return self._free.pop()
        except IndexError:
            return bytearray(CHUNK_BYTES)

    def _rooms(self) -> tuple[bytearray, bytearray]:
        rooms: tuple[bytearray, bytearray] | None = getattr(self._scratch, "rooms", None)
        if rooms is None:
            rooms = self._scratch.rooms = (bytearray(CHUNK_BYTES + TAG_BYTES), bytearray(CHUNK_BYTES))
        return rooms


def _patched(piece: memoryview, position: int, patches: Iterable[tuple[int, bytes]]) -> memoryview:
    """A piece of a stream that begins at `position`, with the patches that touch it applied to a copy."""
    for offset, data in patches:
        start, end = max(offset, position), min(offset + len(data), position + len(piece))
        if start < end:
            copy = bytearray(piece)
            copy[start - position : end - position] = data[start - offset : end - offset]
            piece = memoryview(copy)
    return piece
