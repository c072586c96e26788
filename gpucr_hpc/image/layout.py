"""Bytes of pack headers and of the index. Pure functions; docs/format.md has the same tables.

Who calls: writer (pack), reader (unpack). Nothing here is trusted before the index object has been checked
against the signed manifest and opened with the image key.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpucr_hpc.errors import FormatUnknown, IntegrityError, UsageError
from gpucr_hpc.image.chunks import CHUNK_BYTES, KEY_BYTES, ChunkKind
from gpucr_hpc.model import FORMAT_VERSION, READABLE_VERSIONS, check_object_name

PACK_MAGIC = b"GPUCRPAK"
INDEX_MAGIC = b"GPUCRIDX"
HEADER = struct.Struct("<8sHHHH16s32s")
HEADER_BYTES = HEADER.size
#: Length of the index before compression, right after its header.
INDEX_LENGTH = struct.Struct("<Q")
#: One chunk: offset, stored length, plain length, pack, source, kind, tag, id.
RECORD = struct.Struct("<QIIHBB16s16s")
#: Sources of one image, at most: their number in a record is one byte, and 0 means the image itself.
MAX_SOURCES = 255
_COUNT = struct.Struct("<I")
_STREAM = struct.Struct("<HQI")
#: An index larger than this (32 TiB of plain data) is refused before memory is given to it.
MAX_INDEX_BYTES = 2 << 30


@dataclass(frozen=True)
class Chunk:
    """One record of the index. stored and plain are lengths in bytes; a ZERO chunk has stored 0. source: 0 for a
    pack of this image, else the number of the source, from 1, whose pack it is in."""

    offset: int
    stored: int
    plain: int
    pack: int
    source: int
    kind: int
    tag: bytes
    id: bytes


@dataclass
class Stream:
    """One stream of the index; `records` are its chunks in order, packed."""

    name: str
    size_bytes: int
    records: bytes

    def __len__(self) -> int:
        return len(self.records) // RECORD.size

    def chunk(self, number: int) -> Chunk:
        """Chunk number `number`, from 0."""
        return Chunk(*RECORD.unpack_from(self.records, number * RECORD.size))

    def some(self, numbers: Sequence[int]) -> bytes:
        """The records of these chunks, packed."""
        size = RECORD.size
        if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
            return self.records[numbers[0] * size : (numbers[-1] + 1) * size]
        return b"".join([self.records[number * size : (number + 1) * size] for number in numbers])

    def sizes(self) -> Iterator[int]:
        """The plain length of each chunk."""
        return (record[2] for record in RECORD.iter_unpack(self.records))

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Of each chunk: where it begins in the stream, its plain length, its kind."""
        at = 0
        for _offset, _stored, plain, _pack, _source, kind, _tag, _id in RECORD.iter_unpack(self.records):
            yield at, plain, kind
            at += plain


@dataclass
class Index:
    """A whole index. keys: image keys of the sources, in the manifest's order."""

    keys: list[bytes]
    streams: dict[str, Stream]


def pack_name(node_rank: int, pack: int) -> str:
    """File name of a pack, such as r0000-p00.pack."""
    return f"r{node_rank:04d}-p{pack:02d}.pack"


def index_name(node_rank: int) -> str:
    """File name of the index of an image, such as r0000.index."""
    return f"r{node_rank:04d}.index"


def linked_name(checkpoint: str, node_rank: int, pack: int) -> str:
    """Name of a pack of an earlier checkpoint beside the image that refers to it."""
    return f"{checkpoint}.{pack_name(node_rank, pack)}"


def header(
    magic: bytes, checkpoint: str, node_rank: int, number: int, salt: bytes, version: int = FORMAT_VERSION
) -> bytes:
    """The first 64 bytes of a pack (number: its own) or of an index (number: of packs)."""
    mark = hashlib.sha256(checkpoint.encode()).digest()[:16]
    return HEADER.pack(magic, version, node_rank, number, 0, mark, salt)


def check_header(found: bytes, expected: bytes, path: str) -> None:
    """Magic, then version, then the rest. Raises FormatUnknown, IntegrityError."""
    if len(found) < HEADER_BYTES:
        raise IntegrityError(path=path, reason=f"ends after {len(found)} bytes, inside its header")
    if found[:8] != expected[:8]:
        raise IntegrityError(path=path, reason="does not begin with its magic")
    version = HEADER.unpack(found)[1]
    if version not in READABLE_VERSIONS:
        raise FormatUnknown(path=path, found=version, known=" and ".join(map(str, READABLE_VERSIONS)))
    if found != expected:
        raise IntegrityError(path=path, reason="its header is that of another checkpoint, image or pack")


def index_place(head: bytes, version: int = FORMAT_VERSION) -> bytes:
    """Additional data of an index's seal; head: the file before the ciphertext."""
    return b"gpucr-v%d index\0" % version + head


def encode_index(keys: Sequence[bytes], streams: Mapping[str, tuple[int, bytes | bytearray]]) -> bytes:
    """Index bytes before compression; streams: name -> (plain size, packed records)."""
    parts = [_COUNT.pack(len(keys)), *keys, _COUNT.pack(len(streams))]
    for name, (size_bytes, records) in streams.items():
        raw = name.encode()
        parts += (_STREAM.pack(len(raw), size_bytes, len(records) // RECORD.size), raw, bytes(records))
    return b"".join(parts)


def inflate(data: memoryview, plain_bytes: int, path: str) -> bytes:
    """Decompress an index to exactly `plain_bytes`. Raises IntegrityError."""
    if plain_bytes > MAX_INDEX_BYTES:
        raise IntegrityError(path=path, reason=f"claims an index of {plain_bytes} bytes")
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data, plain_bytes + 1)
    except zlib.error as error:
        raise IntegrityError(path=path, reason=error) from None
    if len(plain) != plain_bytes or not machine.eof or machine.unused_data:
        raise IntegrityError(path=path, reason="its length is not what it claims")
    return plain


def decode_index(data: bytes, path: str) -> Index:
    """The index, its streams in the order of writing. Raises IntegrityError for anything out of shape."""
    start = _COUNT.size
    if len(data) < start:
        raise IntegrityError(path=path, reason="index: ends inside its head")
    (count,) = _COUNT.unpack_from(data)
    end = start + count * KEY_BYTES
    if count > MAX_SOURCES or end > len(data):
        raise IntegrityError(path=path, reason=f"index: cannot have {count} sources")
    keys = [data[at : at + KEY_BYTES] for at in range(start, end, KEY_BYTES)]
    return Index(keys, decode_streams(data, end, RECORD.size, path))


def decode_streams(data: bytes, at: int, record_bytes: int, path: str) -> dict[str, Stream]:
    """The table of streams that begins at `at` and ends with the data. Raises IntegrityError."""
    streams: dict[str, Stream] = {}
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        for _ in range(count):
            name_bytes, size_bytes, chunks = _STREAM.unpack_from(data, at)
            at += _STREAM.size
            name = check_object_name(data[at : at + name_bytes].decode())
            at += name_bytes
            end = at + chunks * record_bytes
            if end > len(data) or name in streams:
                raise ValueError(f"stream {name}: cut short or there twice")
            streams[name] = Stream(name, size_bytes, data[at:end])
            at = end
    except (ValueError, struct.error, UsageError) as error:
        raise IntegrityError(path=path, reason=f"index: {error}") from None
    if at != len(data):
        raise IntegrityError(path=path, reason="index: bytes after its end")
    return streams


def check_geometry(
    streams: Mapping[str, Stream], pack_sizes: list[int], linked: list[dict[int, int]], path: str
) -> list[bytes]:
    """That the chunks make up the streams, fill every own pack without a gap, and lie inside the packs of sources.

    linked: for each source, sizes by pack number. Returns the tags of each own pack by offset. Raises
    IntegrityError. Linear in the number of chunks.
    """
    pieces: list[dict[int, tuple[int, bytes]]] = [{} for _ in pack_sizes]
    zero, raw, packed = (int(kind) for kind in (ChunkKind.ZERO, ChunkKind.RAW, ChunkKind.LZ4))
    own = len(pieces)
    for stream in streams.values():
        total = 0
        for offset, stored, plain, pack, source, kind, tag, _id in RECORD.iter_unpack(stream.records):
            total += plain
            if kind == raw:
                fits = stored == plain
            elif kind == packed:
                fits = 0 < stored < plain
            else:
                fits = kind == zero and stored == 0
            if not fits or not 0 < plain <= CHUNK_BYTES:
                raise IntegrityError(path=path, reason=f"index: stream {stream.name}: a chunk has a wrong shape")
            if kind == zero:
                continue
            if source:
                size = linked[source - 1].get(pack, 0) if source <= len(linked) else 0
                if not HEADER_BYTES <= offset <= size - stored:
                    reason = f"index: stream {stream.name}: source {source} has no such place in pack {pack}"
                    raise IntegrityError(path=path, reason=reason)
            elif pack < own:
                piece = (stored, tag)
                if pieces[pack].setdefault(offset, piece) != piece:
                    raise _gap(pack, offset, path)
            else:
                raise IntegrityError(path=path, reason=f"index: stream {stream.name}: no pack {pack}")
        if total != stream.size_bytes:
            raise IntegrityError(path=path, reason=f"index: stream {stream.name}: its chunks do not add up")
    return [_tile(number, parts, pack_sizes[number], path) for number, parts in enumerate(pieces)]


def pack_digest(head: bytes, tags: bytes) -> str:
    """PackEntry.sha256 of a pack: over its header and the tags of its chunks by offset."""
    return hashlib.sha256(head + tags).hexdigest()


def _tile(number: int, parts: Mapping[int, tuple[int, bytes]], size_bytes: int, path: str) -> bytes:
    at = HEADER_BYTES
    tags = []
    for offset, (stored, tag) in sorted(parts.items()):
        if offset != at:
            raise _gap(number, at, path)
        at += stored
        tags.append(tag)
    if at != size_bytes:
        raise IntegrityError(path=path, reason=f"index: pack {number} should have {at} bytes, not {size_bytes}")
    return b"".join(tags)


def _gap(pack: int, at: int, path: str) -> IntegrityError:
    return IntegrityError(path=path, reason=f"index: pack {pack} has a gap or overlap at byte {at}")
