"""Chunks out of the packs: read, decrypted, expanded, and their ids compared.

Who calls: reader, on any thread. Several chunks are opened in one call of C where that is installed (native).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpucr_hpc.errors import GpucrError, IntegrityError, UsageError, store_error
from gpucr_hpc.image import layout, native, version1
from gpucr_hpc.image.buffers import Buffer, PerThread, copy, decompress
from gpucr_hpc.image.chunkid import ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES, TAG_BYTES, ChunkKind, Origin, unseal
from gpucr_hpc.image.files import PlacedFile


class Opener:
    """origins: where chunks are by the number of their source: the image in which they were sealed, and its packs. ids:
    to compare with, if there is a key for them. version: of the format; checkpoint, rank: of the image."""

    def __init__(
        self,
        origins: Sequence[tuple[Origin, dict[int, PlacedFile]]],
        ids: ChunkIds | None,
        *,
        version: int,
        checkpoint: str,
        rank: int,
    ) -> None:
        self._origins, self._version, self._checkpoint, self._rank = origins, version, checkpoint, rank
        self._ids = ids if version > 1 else None
        self._sealed = PerThread(lambda: Buffer(CHUNK_BYTES + TAG_BYTES))
        self._opened, self._plain = PerThread(lambda: Buffer(CHUNK_BYTES)), PerThread(lambda: Buffer(CHUNK_BYTES))
        self._tables = PerThread(native.Table)

    def open(self, stream: layout.Stream, numbers: Sequence[int], room: Buffer) -> list[tuple[int, int]]:
        """Put the plain bytes of chunks, none of them ZERO, into a buffer one after another: where, and how many.

        Nothing of it is to be used when this raises: IntegrityError, StoreError.
        """
        places, at = [], 0
        chunks = [stream.chunk(number) for number in numbers]
        for chunk in chunks:
            places.append((at, chunk.plain))
            at += chunk.plain
        if at > room.size:
            raise UsageError(reason=f"{at} bytes of chunks do not fit into {room.size}")
        files = [self._origins[chunk.source][1][chunk.pack] for chunk in chunks]
        if native.library is None or self._version == 1 or any(file.fd is None for file in files):
            for number, chunk, file, (begin, _) in zip(numbers, chunks, files, places, strict=True):
                self._open_one(stream.name, number, chunk, file, room, begin)
            return places
        for first in range(0, len(chunks), native.MAX_CHUNKS):
            some = slice(first, first + native.MAX_CHUNKS)
            begins = [room.address + begin for begin, _ in places[some]]
            self._open_some(native.library, stream.name, numbers[some], chunks[some], files[some], begins)
        return places

    def _open_some(
        self,
        library: native.Native,
        name: str,
        numbers: Sequence[int],
        chunks: Sequence[layout.Chunk],
        files: Sequence[PlacedFile],
        addresses: Sequence[int],
    ) -> None:
        table, ids = self._tables.get(), self._ids
        for at, (chunk, address) in enumerate(zip(chunks, addresses, strict=True)):
            table.put(at, (address, 0, chunk.plain, chunk.plain, chunk.stored, chunk.kind, 0, chunk.tag))
        failed, count = library.open(
            [self._origins[chunk.source][0].native_place(chunk.pack, chunk.offset) for chunk in chunks],
            [file.fd for file in files if file.fd is not None],
            table,
            self._sealed.get().address,
            self._opened.get().address,
            None if ids is None else ids.mark_key,
        )
        if ids is not None:
            for row, number, chunk, file in zip(table.rows(count), numbers, chunks, files, strict=False):
                if ids.name(row.tag) != chunk.id:
                    raise _exchanged(name, number, chunk, file)
        if failed:
            raise _failure(failed, name, numbers[count], chunks[count], files[count])

    def _open_one(
        self, name: str, number: int, chunk: layout.Chunk, file: PlacedFile, room: Buffer, begin: int
    ) -> None:
        """The same in Python, for files that are in memory and the first format, too."""
        view = self._sealed.get().view[: chunk.stored + TAG_BYTES]
        if file.read_into(view[: chunk.stored], chunk.offset) != chunk.stored:
            raise _failure(native.SHORT, name, number, chunk, file)
        view[chunk.stored :] = chunk.tag
        origin = self._origins[chunk.source][0]
        if self._version == 1:
            place = version1.place(self._checkpoint, self._rank, name, number, chunk.plain, chunk.kind)
        else:
            place = origin.place(chunk.pack, chunk.offset, chunk.plain, chunk.kind)
        plain = self._plain.get() if begin else room
        target = plain if chunk.kind == ChunkKind.RAW else self._opened.get()
        if not unseal(origin.cipher, origin.nonce(chunk.pack, chunk.offset), view, place, target):
            raise _failure(native.FORGED, name, number, chunk, file)
        if chunk.kind == ChunkKind.LZ4 and not decompress(target, chunk.stored, plain, chunk.plain):
            raise _failure(native.NOT_EXPANDED, name, number, chunk, file)
        if self._ids is not None and self._ids.of(plain.view[: chunk.plain]) != chunk.id:
            raise _exchanged(name, number, chunk, file)
        if plain is not room:
            copy(plain, 0, chunk.plain, room, begin)


def _where(name: str, number: int, chunk: layout.Chunk) -> str:
    return f"chunk {number} of stream {name}, at byte {chunk.offset},"


def _exchanged(name: str, number: int, chunk: layout.Chunk, file: PlacedFile) -> IntegrityError:
    reason = f"{_where(name, number, chunk)} was exchanged by somebody who has the data key"
    return IntegrityError(path=file.path, reason=reason)


def _failure(status: int, name: str, number: int, chunk: layout.Chunk, file: PlacedFile) -> GpucrError:
    match status:
        case native.SHORT:
            reason = f"ends inside the chunk at byte {chunk.offset}"
        case native.FORGED:
            reason = f"{_where(name, number, chunk)} is not what was written"
        case native.NOT_EXPANDED:
            reason = f"{_where(name, number, chunk)} does not expand"
        case _:
            return store_error(file.path, OSError(status, os.strerror(status)))
    return IntegrityError(path=file.path, reason=reason)
