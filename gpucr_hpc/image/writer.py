"""Streams of one capsule into packs, sealed, on several cores.

Who calls: the engine, one thread per pipe (StreamWriter.copy_fd), then finish. A stream is cut into parts of a
few mebibytes, threads cut them into chunks, seal and write these (streams, crew, parts, packs). Reading never waits for
another stream's data: only the number of parts in flight is limited. So memory is a part or two per open stream and a
few per thread, and per MiB of plain data 52 bytes of the index and some 250 of what is remembered of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import secrets
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from gpucr_hpc.errors import GpucrError, ImageError, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.base import Base, Kept
from gpucr_hpc.image.buffers import Pool
from gpucr_hpc.image.chunks import CHUNK_BYTES, INDEX_PACK, MAX_IMAGES, ChunkKind, Origin, nonce
from gpucr_hpc.image.crew import Crew
from gpucr_hpc.image.files import default_workers
from gpucr_hpc.image.keys import KEY_BYTES, DataKey
from gpucr_hpc.image.packs import Packs
from gpucr_hpc.image.parts import Means
from gpucr_hpc.image.relay import Relay
from gpucr_hpc.image.streams import StreamWriter
from gpucr_hpc.model import ImageEntry, PackEntry, check_checkpoint_id, check_object_name

_MAX_PART_CHUNKS = 4


def _part_bytes(threads: int) -> int:
    """Memory that a thread takes at a time: the more threads, the more, since each step of a part gives Python's lock
    away and waits for all others to get it back. With one or two threads, too, 2 MiB cost less than 1 or 4."""
    return CHUNK_BYTES * max(2, min(_MAX_PART_CHUNKS, threads // 2))


class ImageWriter:
    """Writes the image of one node rank; `create` makes its files (Staging.create).

    packs: files that the chunks are spread over, 1 to 100. node: name for people. workers: None means
    default_workers(). base: an earlier image; what did not change since is not written again. room_bytes: memory for
    chunks that wait to be sealed, besides a few per worker. expected_bytes: of plain data; so much of the room is
    made ready at once. Before `finish` only what does not fit into the room is sealed. The first failure of any thread
    is raised by every later call; call abort then. Raises UsageError, StoreFull, StoreError.
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
        self._checkpoint, self._rank, self._node = checkpoint, node_rank, node
        self._salt = secrets.token_bytes(KEY_BYTES)
        origin = Origin(key.image_key(checkpoint, node_rank, self._salt), checkpoint, node_rank)
        ids = key.chunk_ids()
        if ids is None or (base and base.ids.of(b"") != ids.of(b"")):
            raise UsageError(reason="the data key has no id key, or another one than the earlier image")
        self._base = base
        self._lock = threading.Lock()
        self._streams: dict[str, StreamWriter] = {}
        self._ended = False
        self._names = [layout.pack_name(node_rank, number) for number in range(packs)]
        heads = {name: self._header(layout.PACK_MAGIC, number) for number, name in enumerate(self._names)}
        threads = workers or default_workers()
        size = _part_bytes(threads)
        room = room_bytes // size
        places = max(threads + 2, 2 * threads * CHUNK_BYTES // size)
        buffers = Pool(size, 2 * places + room)
        buffers.reserve(min(room, -(-expected_bytes // size)))
        self._packs = Packs(create, heads, origin, ids, base.records if base else {}, size)
        self._means = Means(self._packs, buffers, Relay(threads + 2, size), size, f"image {node_rank}")
        self._crew = Crew(threads, places=places + room, hold=room > 0, name=f"image-{node_rank}")

    def adopt(self, memory: mmap.mmap, begin: int) -> None:
        """Use memory, from `begin` on, for what is read from now on."""
        self._means.buffers.adopt(memory, begin)

    @property
    def bytes_plain(self) -> int:
        """Plain bytes taken so far, from any thread."""
        return sum(stream.size_bytes for stream in list(self._streams.values()) if self._ended or not stream.early)

    @property
    def bytes_stored(self) -> int:
        """Bytes written so far."""
        return self._packs.bytes_stored

    def stream(self, name: str, *, pages: bool = False, early: bool = False) -> StreamWriter:
        """A new stream, from any thread; pages: it holds memory, page by page. Raises UsageError for a bad or repeated
        name.

        early: its content is expected to come again in other streams; of it only chunks remain that did not.
        """
        check_object_name(name)
        with self._lock:
            self._check()
            if name in self._streams:
                raise UsageError(reason=f"stream {name!r} is there already")
            writer = StreamWriter(self._means, self._crew, name, pages, early)
            self._streams[name] = writer
        return writer

    def finish(self) -> ImageEntry:
        """Write the index, fsync and close everything; the entry for the manifest.

        Every stream must be closed (UsageError names one that is not). Raises the first failure of a thread.
        """
        with self._lock:
            self._check()
            still_open = [name for name, stream in self._streams.items() if not stream.closed]
            if still_open:
                raise UsageError(reason=f"stream {still_open[0]!r} is still open")
            self._ended = True
        self._crew.end()
        self._means.relay.close()
        try:
            self._means.check()
            self._settle_early()
            sources = self._settle_sources()
            linked = [{p.number: p.size_bytes for p in each.source.packs} for each in sources]
            with ThreadPoolExecutor(1) as beside:  # much of the index's time is its compression's
                entries = beside.submit(self._pack_entries, linked)
                index = self._write_index([each.key for each in sources])
                self._packs.sync()
                packs = entries.result()
            self._packs.close()
        except GpucrError as error:
            self._means.fail(error)
            self._close()
            raise
        return ImageEntry(
            node_rank=self._rank,
            node=self._node,
            salt=self._salt.hex(),
            index=index,
            packs=packs,
            bytes_plain=self.bytes_plain,
            bytes_stored=self.bytes_stored,
            streams=len(self._streams),
            sources=[each.source for each in sources],
            depth=self._base.depth if self._base and sources else 0,
        )

    def give_up(self) -> None:
        """From any thread, also while another is in `finish`: that one raises as soon as it can."""
        self._means.fail(ImageError(path=f"image {self._rank}", reason="was given up"))

    def abort(self) -> None:
        """Stop the threads and close the files, from any state; the files themselves are Staging.abort's."""
        with self._lock:
            finished, self._ended = self._ended, True
        if not finished:
            self.give_up()
        self._crew.end()
        self._means.relay.close()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(GpucrError):  # there is a failure that says more, or nothing was lost
            self._packs.close()

    def _check(self) -> None:
        self._means.check()
        if self._ended:
            raise UsageError(reason=f"image {self._rank} is finished")

    def _header(self, magic: bytes, number: int) -> bytes:
        return layout.header(magic, self._checkpoint, self._rank, number, self._salt)

    def _settle_early(self) -> None:
        """Early streams keep what no other stream has: each place of a pack belongs to a chunk of the index."""
        early = [stream for stream in self._streams.values() if stream.early]
        if not early:
            return
        used = {record for stream in self._streams.values() if not stream.early for record in _records(stream)}
        for stream in early:
            own = [record for record in dict.fromkeys(_records(stream)) if record not in used and _is_own(record)]
            used.update(own)
            stream.keep_only(b"".join(own))
            if not own:
                del self._streams[stream.name]

    def _settle_sources(self) -> list[Kept]:
        """The sources that are referred to, numbered anew in all records."""
        if self._base is None:
            return []
        used = set()
        for stream in self._streams.values():
            for _, _, _, pack, source, _, _, _ in layout.RECORD.iter_unpack(stream.records):
                if source:
                    used.add((source, pack))
        kept, numbers = self._base.take(used)
        for stream in self._streams.values():
            stream.renumber(numbers)
        return kept

    def _write_index(self, keys: list[bytes]) -> PackEntry:
        name = layout.index_name(self._rank)
        streams = {s.name: (s.size_bytes, s.records) for s in self._streams.values()}
        plain = layout.encode_index(keys, streams)
        head = self._header(layout.INDEX_MAGIC, len(self._names)) + layout.INDEX_LENGTH.pack(len(plain))
        number = nonce(self._rank, INDEX_PACK, 0)
        cipher = self._packs.origin.cipher
        data = head + cipher.encrypt(number, zlib.compress(plain, 1), layout.index_place(head))
        self._packs.add(name, data)
        return PackEntry(name, len(data), hashlib.sha256(data).hexdigest())

    def _pack_entries(self, linked: list[dict[int, int]]) -> list[PackEntry]:
        streams = {s.name: layout.Stream(s.name, s.size_bytes, bytes(s.records)) for s in self._streams.values()}
        sizes = self._packs.ends[: len(self._names)]
        tags = layout.check_geometry(streams, sizes, linked, layout.index_name(self._rank))
        entries = []
        for number, name in enumerate(self._names):
            digest = layout.pack_digest(self._header(layout.PACK_MAGIC, number), tags[number])
            entries.append(PackEntry(name, sizes[number], digest))
        return entries


def _records(stream: StreamWriter) -> list[bytes]:
    records, size = bytes(stream.records), layout.RECORD.size
    return [records[at : at + size] for at in range(0, len(records), size)]


def _is_own(record: bytes) -> bool:
    """Whether a chunk has a place in a pack of this image."""
    _, _, _, _, source, kind, _, _ = layout.RECORD.unpack(record)
    return bool(not source and kind != ChunkKind.ZERO)
