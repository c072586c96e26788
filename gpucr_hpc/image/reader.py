"""Streams of one image back out of its packs; nothing leaves before it was checked.

Who calls: restore, one thread per pipe that CRIU opens (copy_to_fd). The constructor does all checks that
need no chunk: sizes of all files against the signed manifest, headers, index, geometry. A chunk is checked by
its tag before any byte of it is written. Chunks are read ahead on a pool, AHEAD per stream.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from cryptography.exceptions import InvalidTag

from gpucr_hpc.errors import IntegrityError, ObjectMissing, UsageError
from gpucr_hpc.image import layout, version1
from gpucr_hpc.image.buffers import Buffer, Pool
from gpucr_hpc.image.chunks import (
    CHUNK_BYTES,
    INDEX_PACK,
    MAX_IMAGES,
    TAG_BYTES,
    ZEROS,
    ChunkKind,
    Origin,
    nonce,
)
from gpucr_hpc.image.files import PlacedFile, default_workers
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.opening import Opener
from gpucr_hpc.image.pipes import Outlet
from gpucr_hpc.model import ImageEntry, LinkedPack, PackEntry

#: Chunks of one stream that are read before they are asked for; also its memory in MiB.
AHEAD = 8
_Piece = tuple[memoryview, Buffer]
_Part = PackEntry | LinkedPack


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
        self.entry, self.checkpoint, self._rank = entry, checkpoint, entry.node_rank
        if self._rank >= MAX_IMAGES or not 1 <= len(entry.packs) < INDEX_PACK:
            raise UsageError(reason=f"image {self._rank}: node rank or number of packs is out of range")
        self._salt = bytes.fromhex(entry.salt)
        self.key, self.ids = key.image_key(checkpoint, self._rank, self._salt), key.chunk_ids()
        own = Origin(self.key, checkpoint, self._rank)
        threads = workers or default_workers()
        self._buffers = Pool(CHUNK_BYTES, 4 * AHEAD)
        self._files: list[PlacedFile] = []
        try:
            self.index = self._read_index(self._open(open_, entry.index), own)
            #: Where chunks are by the number of their source: the image in which they were sealed, and its packs.
            self._origins: list[tuple[Origin, dict[int, PlacedFile]]] = [
                (own, {n: self._open(open_, part) for n, part in enumerate(entry.packs)}),
                *self._open_sources(open_),
            ]
            self._check_packs()
        except BaseException:
            self._close_files()
            raise
        self._opener = Opener(self._origins, self.ids, version=entry.format, checkpoint=checkpoint, rank=self._rank)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"image-{self._rank}")

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the packs; twice is fine."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def names(self) -> list[str]:
        """Names of the streams, in the order in which they were opened for writing."""
        return list(self.index.streams)

    def size(self, name: str) -> int:
        """Plain size in bytes. Raises UsageError for an unknown name."""
        return self._stream(name).size_bytes

    def read(self, name: str) -> bytes:
        """A whole (small) stream."""
        stream = self._stream(name)
        if len(stream) == 1:  # most files of CRIU's
            piece, buffer = self._fetch(stream, 0)
            data = bytes(piece)
            self._give_back(buffer)
            return data
        return b"".join([bytes(piece) for piece in self.pieces(name)])

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A stream in pieces of at most CHUNK_BYTES, each checked, and valid until the next is asked for."""
        for _, piece, buffer in self._pieces(self._stream(name)):
            yield piece
            self._give_back(buffer)

    def copy_to_fd(
        self,
        name: str,
        fd: int,
        patches: Iterable[tuple[int, bytes]] = (),
        *,
        lending: bool = False,
        without: Container[int] = (),
    ) -> int:
        """Write a stream to a pipe or file; the bytes written. The caller closes fd, which is the end of the stream.

        patches, lending: as Outlet has them. without: numbers of chunks that are left out.

        A damaged chunk raises IntegrityError before any byte of it is written. Raises BrokenPipeError when
        the other side has closed, OSError (of the descriptor), UsageError (no such stream).
        """
        outlet = Outlet(fd, self._buffers, patches, lending=lending)
        written = 0
        for position, piece, buffer in self._pieces(self._stream(name), without):
            written += len(piece)
            outlet.put(position, piece, buffer)
        return written

    def open_into(self, name: str, numbers: Sequence[int], room: Buffer) -> list[tuple[int, int]]:
        """Chunks of a stream, none of them ZERO, checked and one after another in a buffer: where, and how many bytes;
        on this thread. Raises IntegrityError, StoreError; nothing in the buffer is to be used then."""
        return self._opener.open(self._stream(name), numbers, room)

    def verify(self, deep: bool = False) -> None:
        """Check the files' sizes again; deep: read and open every chunk. Raises IntegrityError."""
        parts: list[_Part] = [self.entry.index, *self.entry.packs]
        parts += [part for source in self.entry.sources for part in source.packs]
        for part, file in zip(parts, self._files, strict=True):
            self._check_size(part, file)
        if deep:
            for name in self.index.streams:
                for _ in self.pieces(name):
                    pass

    # --- opening ----------------------------------------------------------------------------------------

    def _open(self, open_: Callable[[str], BinaryIO], part: _Part) -> PlacedFile:
        try:
            file = PlacedFile(open_(part.name), part.name)
        except (FileNotFoundError, ObjectMissing):
            raise IntegrityError(path=part.name, reason="the file is missing") from None
        self._files.append(file)
        self._check_size(part, file)
        return file

    def _open_sources(self, open_: Callable[[str], BinaryIO]) -> Iterator[tuple[Origin, dict[int, PlacedFile]]]:
        sources, keys = self.entry.sources, self.index.keys
        if len(sources) != len(keys):
            reason = f"knows {len(keys)} sources, the manifest {len(sources)}"
            raise IntegrityError(path=self.entry.index.name, reason=reason)
        for source, key in zip(sources, keys, strict=True):
            packs = {part.number: self._open(open_, part) for part in source.packs}
            for number, file in packs.items():
                salt = bytes.fromhex(source.salt)
                head = layout.header(layout.PACK_MAGIC, source.checkpoint, source.node_rank, number, salt)
                self._check_head(file, head)
            yield Origin(key, source.checkpoint, source.node_rank), packs

    def _check_size(self, part: _Part, file: PlacedFile) -> None:
        found = file.size()
        if found != part.size_bytes:
            reason = f"has {found} bytes, the manifest says {part.size_bytes}"
            raise IntegrityError(path=part.name, reason=reason)

    def _check_head(self, file: PlacedFile, expected: bytes) -> None:
        found = bytearray(layout.HEADER_BYTES)
        count = file.read_into(memoryview(found), 0)
        layout.check_header(bytes(found[:count]), expected, file.path)

    def _read_index(self, file: PlacedFile, own: Origin) -> layout.Index:
        path, size, version = file.path, self.entry.index.size_bytes, self.entry.format
        start = layout.HEADER_BYTES + layout.INDEX_LENGTH.size
        if not start + TAG_BYTES <= size <= layout.MAX_INDEX_BYTES:
            raise IntegrityError(path=path, reason=f"an index cannot have {size} bytes")
        data = bytearray(size)
        if file.read_into(memoryview(data), 0) != size:
            raise IntegrityError(path=path, reason="became shorter while it was read")
        packs = len(self.entry.packs)
        expected = layout.header(layout.INDEX_MAGIC, self.checkpoint, self._rank, packs, self._salt, version)
        layout.check_header(bytes(data[: layout.HEADER_BYTES]), expected, path)
        if hashlib.sha256(data).hexdigest() != self.entry.index.sha256:
            raise IntegrityError(path=path, reason="is not the file that the manifest names")
        try:
            place = layout.index_place(bytes(data[:start]), version)
            packed = own.cipher.decrypt(nonce(self._rank, INDEX_PACK, 0), memoryview(data)[start:], place)
        except InvalidTag:
            raise IntegrityError(path=path, reason="the data key does not open it") from None
        (length,) = layout.INDEX_LENGTH.unpack_from(data, layout.HEADER_BYTES)
        plain = layout.inflate(memoryview(packed), length, path)
        return version1.decode_index(plain, path) if version == 1 else layout.decode_index(plain, path)

    def _check_packs(self) -> None:
        entry, streams = self.entry, self.index.streams
        sizes = [pack.size_bytes for pack in entry.packs]
        linked = [{part.number: part.size_bytes for part in source.packs} for source in entry.sources]
        tags = layout.check_geometry(streams, sizes, linked, entry.index.name)
        for number, part in enumerate(entry.packs):
            head = layout.header(layout.PACK_MAGIC, self.checkpoint, self._rank, number, self._salt, entry.format)
            self._check_head(self._origins[0][1][number], head)
            if layout.pack_digest(head, tags[number]) != part.sha256:
                raise IntegrityError(path=part.name, reason="is not the pack that the index describes")
        plain = sum(stream.size_bytes for stream in streams.values())
        if plain != entry.bytes_plain or len(streams) != entry.streams:
            raise IntegrityError(path=entry.index.name, reason="does not hold what the manifest says")

    # --- chunks -----------------------------------------------------------------------------------------

    def _stream(self, name: str) -> layout.Stream:
        try:
            return self.index.streams[name]
        except KeyError:
            raise UsageError(reason=f"image {self._rank} has no stream {name!r}") from None

    def _give_back(self, buffer: Buffer) -> None:
        if buffer is not ZEROS:
            self._buffers.give(buffer)

    def _pieces(self, stream: layout.Stream, without: Container[int] = ()) -> Iterator[tuple[int, memoryview, Buffer]]:
        """Plain bytes chunk by chunk, in order: their place in the stream, and they at the beginning of a buffer that
        the caller gives back."""
        waiting: deque[tuple[int, Future[_Piece]]] = deque()
        wanted = ((at, number) for number, (at, _, _) in enumerate(stream.places()) if number not in without)
        try:
            while True:
                for at, number in itertools.islice(wanted, AHEAD - len(waiting)):
                    waiting.append((at, self._pool.submit(self._fetch, stream, number)))
                if not waiting:
                    return
                at, future = waiting.popleft()
                yield at, *future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _fetch(self, stream: layout.Stream, sequence: int) -> _Piece:
        """On a worker: read, check, open and expand one chunk."""
        chunk = stream.chunk(sequence)
        if chunk.kind == ChunkKind.ZERO:
            return ZEROS.view[: chunk.plain], ZEROS
        plain = self._buffers.take()
        self._opener.open(stream, (sequence,), plain)
        return plain.view[: chunk.plain], plain
