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
        self._openings = PerThread(self._opening)
        self._by_library = self._version > 1 and all(f.fd is not None for _, files in origins for f in files.values())

    def _opening(self) -> native.Opening:
        return native.Opening(
            [origin.native_place(0, 0) for origin, _ in self._origins],
            [{n: file.fd for n, file in files.items() if file.fd is not None} for _, files in self._origins],
            None if self._ids is None else self._ids.mark_key,
            self._sealed.get().address,
            self._opened.get().address,
        )

    def open(self, stream: layout.Stream, numbers: Sequence[int], room: Buffer) -> list[tuple[int, int]]:
        """Put the plain bytes of chunks, none of them ZERO, into a buffer one after another: where, and how many.

        Nothing of it is to be used when this raises: IntegrityError, StoreError.
        """
        records = stream.some(numbers)
        places, at = [], 0
        for _offset, _stored, plain, *_ in layout.RECORD.iter_unpack(records):
            places.append((at, plain))
            at += plain
        if at > room.size:
            raise UsageError(reason=f"{at} bytes of chunks do not fit into {room.size}")
        if native.library is not None and self._by_library:
            self._open_all(native.library, stream, numbers, records, room)
        else:
            for number, (begin, _) in zip(numbers, places, strict=True):
                chunk = stream.chunk(number)
                self._open_one(stream.name, number, chunk, self._file(chunk), room, begin)
        return places

    def _open_all(
        self, library: native.Native, stream: layout.Stream, numbers: Sequence[int], records: bytes, room: Buffer
    ) -> None:
        failed, marks = library.open(self._openings.get(), records, len(numbers), room.address)
        wrong = None
        if self._ids is not None:
            names = (record[-1] for record in layout.RECORD.iter_unpack(records))
            found = zip(numbers, marks, names, strict=False)
            wrong = next((number for number, mark, name in found if self._ids.name(mark) != name), None)
        if wrong is not None:
            chunk = stream.chunk(wrong)
            raise _exchanged(stream.name, wrong, chunk, self._file(chunk))
        if failed:
            chunk = stream.chunk(numbers[len(marks)])
            raise _failure(failed, stream.name, numbers[len(marks)], chunk, self._file(chunk))

    def _file(self, chunk: layout.Chunk) -> PlacedFile:
        return self._origins[chunk.source][1][chunk.pack]

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
