"""Streams of one capsule into packs, sealed, on several cores.

Who calls: the engine, one thread per pipe (StreamWriter.copy_fd), then finish. A thread reads its pipe into
a buffer of one chunk and hands the full buffer to a pool; the pool compresses, seals and writes. Reading
never waits for another stream's data: the buffer being filled belongs to the stream, and only the number of
chunks in flight is limited. So memory is one chunk per open stream and a few per worker, and per MiB of plain
data 52 bytes of the index and some 250 of what is remembered of it.

Who wants the pipes read as soon as can be gives room for more chunks in flight; the pool then holds back until the
room is used up or everything has been read, since reading and sealing would share the processors.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import select
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from gpucr_hpc.errors import GpucrError, ImageError, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.base import MAX_KNOWN, Base, Kept
from gpucr_hpc.image.buffers import Buffer, PerThread, Pool
from gpucr_hpc.image.chunkid import ID_BYTES
from gpucr_hpc.image.chunks import (
    CHUNK_BYTES,
    INDEX_PACK,
    MAX_IMAGES,
    TAG_BYTES,
    ChunkKind,
    Origin,
    is_zero,
    nonce,
    seal,
    squeeze,
)
from gpucr_hpc.image.cutting import cuts
from gpucr_hpc.image.files import PlacedFile, default_workers, wait_for, widen_pipe
from gpucr_hpc.image.keys import KEY_BYTES, DataKey
from gpucr_hpc.model import ImageEntry, PackEntry, check_checkpoint_id, check_object_name

_EMPTY_RECORD = bytes(layout.RECORD.size)
_SMALL_BYTES = 64 << 10  # sealed where it was read: a hand-over costs as much, and its buffer would be mostly air
_ZERO_TAG, _ZERO_ID = bytes(TAG_BYTES), bytes(ID_BYTES)


class ImageWriter:
    """Writes the image of one node rank; `create` makes its files (Staging.create).

    packs: files that the chunks are spread over, 1 to 100. node: name for people. workers: None means
    default_workers(). base: an earlier image; what did not change since is not written again. room_bytes: memory for
    chunks that wait to be sealed, besides a few per worker. expected_bytes: of plain data; so much of the room is
    made ready at once, and when all fits in, nothing is sealed before `finish`. The first failure of any thread is
    raised by every later call; call abort then. Raises UsageError, StoreFull, StoreError.
    """

    def __init__(
        self,
        create: Callable[[str], BinaryIO],
        *,
        checkpoint: str,
        node_rank: int,
        key: DataKey,
        packs: int = 2,
        node: str = "",
        workers: int | None = None,
        base: Base | None = None,
        room_bytes: int = 0,
        expected_bytes: int = 0,
    ) -> None:
        check_checkpoint_id(checkpoint)
        if not 0 <= node_rank < MAX_IMAGES or not 1 <= packs <= 100:
            raise UsageError(reason=f"node rank {node_rank} or {packs} packs is out of range")
        self._create = create
        self._checkpoint, self._rank, self._node = checkpoint, node_rank, node
        self._salt = secrets.token_bytes(KEY_BYTES)
        self._origin = Origin(key.image_key(checkpoint, node_rank, self._salt), checkpoint, node_rank)
        ids = key.chunk_ids()
        if ids is None or (base and base.ids.of(b"") != ids.of(b"")):
            raise UsageError(reason="the data key has no id key, or another one than the earlier image")
        self._ids, self._base = ids, base
        self._known: dict[bytes, bytes] = base.records if base else {}
        self._lock = threading.Lock()
        self._streams: dict[str, StreamWriter] = {}
        self._failure: GpucrError | None = None
        self._ended = False
        self._plain = self._stored = 0
        self._next_pack = itertools.cycle(range(packs))
        self._files: list[PlacedFile] = []
        self._ends: list[int] = []
        threads = workers or default_workers()
        room = room_bytes // CHUNK_BYTES
        self._in_flight = threading.BoundedSemaphore(2 * threads + room)
        self._buffers = Pool(CHUNK_BYTES, 4 * threads + room)
        self._begin = threading.Event()  # of sealing
        if not 0 < expected_bytes <= room_bytes:
            self._begin.set()
        self._packed, self._sealed = PerThread(CHUNK_BYTES), PerThread(CHUNK_BYTES + TAG_BYTES)
        try:
            for number in range(packs):
                name = layout.pack_name(node_rank, number)
                file = PlacedFile(create(name), name)
                self._files.append(file)
                head = layout.header(layout.PACK_MAGIC, checkpoint, node_rank, number, self._salt)
                file.write_at(head, 0)
                self._ends.append(len(head))
                self._stored += len(head)
        except BaseException:
            self._close_files()
            raise
        self._buffers.reserve(min(room, -(-expected_bytes // CHUNK_BYTES)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"image-{node_rank}")

    @property
    def bytes_plain(self) -> int:
        """Plain bytes taken so far, from any thread."""
        return self._plain

    @property
    def bytes_stored(self) -> int:
        """Bytes written so far."""
        return self._stored

    def stream(self, name: str, *, pages: bool = False) -> StreamWriter:
        """A new stream, from any thread; pages: it holds memory, page by page. Raises UsageError for a bad or repeated
        name."""
        check_object_name(name)
        with self._lock:
            self._check()
            if name in self._streams:
                raise UsageError(reason=f"stream {name!r} is there already")
            writer = StreamWriter(self, name, pages)
            self._streams[name] = writer
        return writer

    def finish(self) -> ImageEntry:
        """Write the index, fsync and close everything; the entry for the manifest.

        Every stream must be closed (UsageError names one that is not). Raises the first failure of a worker.
        """
        with self._lock:
            self._check()
            still_open = [name for name, stream in self._streams.items() if not stream.closed]
            if still_open:
                raise UsageError(reason=f"stream {still_open[0]!r} is still open")
            self._ended = True
        self._begin.set()
        self._pool.shutdown(wait=True)
        try:
            if self._failure:
                raise self._failure
            sources = self._settle_sources()
            index = self._write_index([each.key for each in sources])
            sizes = [file.size() for file in self._files]
            if sizes != self._ends:
                raise ImageError(path=self._files[0].path, reason=f"sizes {sizes}, written {self._ends}")
            syncs = ThreadPoolExecutor(len(self._files))
            list(syncs.map(PlacedFile.sync, self._files))
            syncs.shutdown()
        except GpucrError as error:
            self._fail(error)
            raise
        finally:
            self._close_files()
        return ImageEntry(
            node_rank=self._rank,
            node=self._node,
            salt=self._salt.hex(),
            index=index,
            packs=self._pack_entries([{p.number: p.size_bytes for p in each.source.packs} for each in sources]),
            bytes_plain=self._plain,
            bytes_stored=self._stored,
            streams=len(self._streams),
            sources=[each.source for each in sources],
            depth=self._base.depth if self._base and sources else 0,
        )

    def give_up(self) -> None:
        """From any thread, also while another is in `finish`: that one raises as soon as it can."""
        self._fail(ImageError(path=f"image {self._rank}", reason="was given up"))

    def abort(self) -> None:
        """Stop the workers and close the files, from any state; the files themselves are Staging.abort's."""
        with self._lock:
            if self._failure is None and not self._ended:
                self._failure = ImageError(path=f"image {self._rank}", reason="was given up")
            self._ended = True
        self._begin.set()
        # Not cancelled: each chunk that waits gives its place back, for which a copy_fd may wait.
        self._pool.shutdown(wait=True)
        self._close_files()

    # --- for StreamWriter -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure:
            raise self._failure
        if self._ended:
            raise UsageError(reason=f"image {self._rank} is finished")

    def _submit(self, stream: StreamWriter, sequence: int, buffer: Buffer, ends: list[int]) -> None:
        if not self._in_flight.acquire(blocking=False):
            self._begin.set()
            self._in_flight.acquire()
        try:
            self._check()
            if ends[-1] <= _SMALL_BYTES:
                self._work(stream, sequence, buffer, ends)
            else:
                self._pool.submit(self._wait_and_work, stream, sequence, buffer, ends)
        except BaseException:
            self._in_flight.release()
            if isinstance(self._failure, GpucrError):
                raise self._failure from None
            raise
        with self._lock:
            self._plain += ends[-1]

    def _wait_and_work(self, stream: StreamWriter, sequence: int, buffer: Buffer, ends: list[int]) -> None:
        self._begin.wait()
        self._work(stream, sequence, buffer, ends)

    def _work(self, stream: StreamWriter, sequence: int, buffer: Buffer, ends: list[int]) -> None:
        """On a worker: squeeze, seal, write the chunks of a buffer. A failure ends the whole image."""
        try:
            records, at = [], 0
            for end in ends:
                if self._failure is not None:
                    return
                records.append(self._store(buffer, at, end - at))
                at = end
            stream._record(sequence, b"".join(records))
        except GpucrError as error:
            self._fail(error)
        except Exception as error:  # a bug or MemoryError: the image must not look complete
            self._fail(ImageError(path=f"image {self._rank}", reason=f"{type(error).__name__}: {error}"))
        finally:
            self._buffers.give(buffer)
            self._in_flight.release()

    def _fail(self, error: GpucrError) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _store(self, buffer: Buffer, at: int, size: int) -> bytes:
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
        with self._lock:
            pack = next(self._next_pack)
            offset = self._ends[pack]
            self._ends[pack] += length
        origin = self._origin
        place = origin.place(pack, offset, size, kind)
        sealed = seal(origin.cipher, origin.nonce(pack, offset), payload, place, self._sealed.get())
        self._files[pack].write_at(sealed[:length], offset)
        record = layout.RECORD.pack(offset, length, size, pack, 0, kind, bytes(sealed[length:]), name)
        with self._lock:
            self._stored += length
            if len(self._known) < MAX_KNOWN:
                self._known[name] = record
        return record

    # --- end --------------------------------------------------------------------------------------------

    def _settle_sources(self) -> list[Kept]:
        """The sources that are referred to, numbered anew in all records."""
        if self._base is None:
            return []
        used = set()
        for stream in self._streams.values():
            for _, _, _, pack, source, _, _, _ in layout.RECORD.iter_unpack(stream._records):
                if source:
                    used.add((source, pack))
        kept, numbers = self._base.take(used)
        for stream in self._streams.values():
            stream._renumber(numbers)
        return kept

    def _write_index(self, keys: list[bytes]) -> PackEntry:
        name = layout.index_name(self._rank)
        streams = {s.name: (s.size_bytes, s._records) for s in self._streams.values()}
        plain = layout.encode_index(keys, streams)
        head = layout.header(layout.INDEX_MAGIC, self._checkpoint, self._rank, len(self._files), self._salt)
        head += layout.INDEX_LENGTH.pack(len(plain))
        number = nonce(self._rank, INDEX_PACK, 0)
        data = head + self._origin.cipher.encrypt(number, zlib.compress(plain, 1), layout.index_place(head))
        file = PlacedFile(self._create(name), name)
        self._files.append(file)
        self._ends.append(len(data))
        file.write_at(data, 0)
        self._stored += len(data)
        return PackEntry(name, len(data), hashlib.sha256(data).hexdigest())

    def _pack_entries(self, linked: list[dict[int, int]]) -> list[PackEntry]:
        packs = len(self._files) - 1
        streams = {s.name: layout.Stream(s.name, s.size_bytes, bytes(s._records)) for s in self._streams.values()}
        tags = layout.check_geometry(streams, self._ends[:packs], linked, layout.index_name(self._rank))
        entries = []
        for number in range(packs):
            head = layout.header(layout.PACK_MAGIC, self._checkpoint, self._rank, number, self._salt)
            digest = layout.pack_digest(head, tags[number])
            entries.append(PackEntry(self._files[number].path, self._ends[number], digest))
        return entries

    def _close_files(self) -> None:
        failure: GpucrError | None = None
        for file in self._files:
            try:
                file.close()
            except GpucrError as error:
                failure = failure or error
        if failure and self._failure is None:
            self._failure = failure
            raise failure


class StreamWriter:
    """One stream of an image; used by one thread at a time."""

    def __init__(self, image: ImageWriter, name: str, pages: bool) -> None:
        self.name = name
        self.size_bytes = 0
        self.closed = False
        self._image, self._pages = image, pages
        self._buffer: Buffer | None = None
        self._filled = 0
        self._lock = threading.Lock()
        self._records = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take all of `data`; its length. Raises the image's first failure, UsageError when closed."""
        left = memoryview(data).cast("B")
        total = len(left)
        while left:
            buffer = self._room()
            count = min(len(left), CHUNK_BYTES - self._filled)
            buffer.view[self._filled : self._filled + count] = left[:count]
            left = left[count:]
            self._advance(count)
        return total

    def copy_fd(self, fd: int) -> int:
        """Read a pipe, socket or file to its end into the stream; the bytes read. The caller closes both.

        Returns when the last byte has left the pipe, even if chunks still wait for the disk: CRIU's pages in
        a pipe are live pages of the job, so its post-dump hook must wait for exactly this.
        Raises OSError (of the descriptor), the image's first failure.
        """
        widen_pipe(fd)
        total = 0
        while True:
            buffer = self._room()
            try:
                count = os.readv(fd, [buffer.view[self._filled :]])
            except BlockingIOError:
                wait_for(fd, select.POLLIN)
                continue
            if not count:
                return total
            total += count
            self._advance(count)

    def close(self) -> None:
        """Hand over what is left; twice is fine. Raises the image's first failure."""
        if self.closed:
            return
        if self._filled:
            self._flush(last=True)
        elif self._buffer is not None:
            self._image._buffers.give(self._buffer)
        self._buffer = None
        self.closed = True
        if self._image._failure:
            raise self._image._failure

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        """Close after success; after an exception the stream stays open, so that finish refuses the image."""
        if kind is None:
            self.close()

    def _room(self) -> Buffer:
        if self.closed:
            raise UsageError(reason=f"stream {self.name!r} is closed")
        if self._buffer is None:
            self._buffer = self._image._buffers.take()
        return self._buffer

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == CHUNK_BYTES:
            self._flush()

    def _flush(self, last: bool = False) -> None:
        """Hand the buffer over, up to its last cut; what follows that is the beginning of the next buffer."""
        buffer, size = self._buffer, self._filled
        assert buffer is not None
        ends = cuts(buffer.view, size) if self._pages else []
        if not ends or (last and ends[-1] < size):
            ends.append(size)
        self._buffer, self._filled = None, 0
        done = ends[-1]
        if done < size:
            rest = self._room()
            rest.view[: size - done] = buffer.view[done:size]
            self._filled = size - done
        with self._lock:
            sequence = len(self._records) // layout.RECORD.size
            self._records += _EMPTY_RECORD * len(ends)
        self.size_bytes += done
        self._image._submit(self, sequence, buffer, ends)

    def _record(self, sequence: int, records: bytes) -> None:
        with self._lock:
            at = sequence * layout.RECORD.size
            self._records[at : at + len(records)] = records

    def _renumber(self, numbers: dict[int, int]) -> None:
        """Sources that have got other numbers, 0 staying 0; no chunk is on its way any more."""
        if all(old == new for old, new in numbers.items()):
            return
        records = bytearray()
        for record in layout.RECORD.iter_unpack(self._records):
            offset, stored, plain, pack, source, kind, tag, name = record
            records += layout.RECORD.pack(offset, stored, plain, pack, numbers.get(source, 0), kind, tag, name)
        self._records = records
