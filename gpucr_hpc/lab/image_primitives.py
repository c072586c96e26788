"""The steps of a chunk alone, on warm buffers, and how near the whole path comes to their harmonic limit."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gpucr_hpc.image import native
from gpucr_hpc.image.buffers import Buffer, compress, decompress
from gpucr_hpc.image.chunkid import ChunkIds
from gpucr_hpc.image.chunks import CHUNK_BYTES, SAMPLE_BYTES, TAG_BYTES, Origin, is_zero, seal, squeeze, unseal
from gpucr_hpc.image.cutting import cut
from gpucr_hpc.image.extents import Extent
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.writer import ImageWriter

ROUNDS = 7
_CHUNKS = 100
_PATH_CHUNKS = 500  # so that memory that is new once for an image does not count
_MEMORY_CHUNKS = 1000
ID = "20261127T232501Z-3f9a"


def text() -> bytes:
    """A chunk that LZ4 brings to about a half."""
    rng = random.Random(7)  # noqa: S311 - content of a chunk, the same each time
    words = [rng.randbytes(8) for _ in range(300)]
    return b"".join(rng.choice(words) if rng.random() < 0.85 else rng.randbytes(8) for _ in range(CHUNK_BYTES // 8))


def steps() -> dict[str, Callable[[], object]]:
    """Each step on buffers of its own."""
    noise, words, zero = Buffer(CHUNK_BYTES), Buffer(CHUNK_BYTES), Buffer(CHUNK_BYTES)
    noise.view[:], words.view[:] = os.urandom(CHUNK_BYTES), text()
    room, sealed, packed = Buffer(CHUNK_BYTES), Buffer(CHUNK_BYTES + TAG_BYTES), Buffer(CHUNK_BYTES)
    length = compress(words, 0, CHUNK_BYTES, packed, CHUNK_BYTES)
    origin, ids = Origin(bytes(32), ID, 0), ChunkIds(bytes(32))
    number, place = origin.nonce(0, 64), origin.place(0, 64, CHUNK_BYTES, 1)
    closed = Buffer(CHUNK_BYTES + TAG_BYTES)
    seal(origin.cipher, number, noise.view, place, closed)
    return {
        "memcpy": lambda: room.view.__setitem__(slice(None), noise.view),
        "zero test": lambda: is_zero(zero, 0, CHUNK_BYTES),
        "cuts": lambda: cut(noise, CHUNK_BYTES, 0, 1),
        "id": lambda: ids.of(noise.view),
        "SHA-256, for comparison": lambda: hashlib.sha256(noise.view).digest(),
        "AES-256-GCM": lambda: seal(origin.cipher, number, noise.view, place, sealed),
        "AES-256-GCM, opening": lambda: unseal(origin.cipher, number, closed.view, place, room),
        "LZ4 of words": lambda: squeeze(words, 0, CHUNK_BYTES, room),
        "LZ4 of words, expanding": lambda: decompress(packed, length, room, CHUNK_BYTES),
        "LZ4 of noise (sample only)": lambda: squeeze(noise, 0, CHUNK_BYTES, room),
        "LZ4 of noise, whole": lambda: compress(noise, 0, CHUNK_BYTES, room, CHUNK_BYTES),
    }


def rate(works: list[Callable[[], object]]) -> float:
    """GB/s of plain bytes, each work in a thread of its own; the median of some rounds."""
    found = []
    for _ in range(ROUNDS):
        threads = [threading.Thread(target=lambda w=work: [w() for _ in range(_CHUNKS)]) for work in works]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(len(works) * _CHUNKS * CHUNK_BYTES / (time.perf_counter() - start) / 1e9)
    return statistics.median(found)


class _Nowhere(io.RawIOBase):
    """Takes everything and keeps nothing."""

    def __init__(self) -> None:
        self._at = self._end = 0

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = self._end if whence == 2 else at
        return self._at

    def write(self, data: Any) -> int:
        self._end = max(self._end, self._at + len(data))
        return len(data)


def cost(work: Callable[[], object]) -> float:
    """CPU seconds of one call: the least of some rounds, which other load on the machine disturbs little."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(_CHUNKS):
            work()
        found.append((time.process_time() - start) / _CHUNKS)
    return min(found)


class _Memory:
    """Parts of a stream that threads fetch, as they do memory of a process; no chunk is equal to an earlier one,
    wherever the cuts are."""

    def __init__(self, content: Buffer, number: int) -> None:
        self._content, self._number = content, number

    def empty_into(self, room: memoryview) -> None:
        for at in range(0, len(room), self._content.size):
            room[at : at + self._content.size] = self._content.view
        words = room.cast("Q")[8 :: (32 << 10) // 8]
        words[:] = memoryview(array("Q", range(self._number * len(words), (self._number + 1) * len(words))))

    def done(self, *, empty: bool) -> None:
        """Nothing to give back."""


def path(content: Buffer, threads: int) -> tuple[float, float]:
    """The writer itself, a store that takes no time behind it: GB/s, and CPU seconds for each MiB, of one round."""
    image = ImageWriter(
        lambda _name: _Nowhere(),  # type: ignore[arg-type,return-value]
        checkpoint=ID,
        node_rank=0,
        key=DataKey.generate(),
        workers=threads,
    )
    start, used = time.perf_counter(), time.process_time()
    with image.stream("pages-1.img", pages=True) as stream:
        size = stream._part_bytes
        for number in range(_PATH_CHUNKS * CHUNK_BYTES // size):
            stream._submit(size, _Memory(content, number))
    image._crew.end()
    took, used = time.perf_counter() - start, time.process_time() - used
    image.abort()
    return _PATH_CHUNKS * CHUNK_BYTES / took / 1e9, used / _PATH_CHUNKS


@contextmanager
def memory() -> Iterator[int]:
    """A file in memory, noise of which no chunk is equal to another."""
    fd, noise = os.memfd_create("memory"), bytearray(os.urandom(CHUNK_BYTES))
    try:
        for number in range(_MEMORY_CHUNKS):
            for at in range(0, CHUNK_BYTES, 32 << 10):
                noise[at + 64 : at + 72] = (number * CHUNK_BYTES + at).to_bytes(8, "little")
            os.write(fd, noise)
        yield fd
    finally:
        os.close(fd)


def whole(source: int, threads: int) -> float:
    """GB/s from memory that threads read, as it is read beside CRIU, into packs that are files in memory."""
    image = ImageWriter(
        lambda _name: open(os.memfd_create("pack"), "w+b", buffering=0),  # noqa: SIM115 - the image closes it
        checkpoint=ID,
        node_rank=0,
        key=DataKey.generate(),
        packs=8,
        workers=threads,
    )
    start = time.perf_counter()
    with image.stream("pages-1.img", pages=True) as stream:
        stream.copy_extents([Extent(source, 0, _MEMORY_CHUNKS * CHUNK_BYTES)])
    image._crew.end()
    took = time.perf_counter() - start
    image.abort()
    return _MEMORY_CHUNKS * CHUNK_BYTES / took / 1e9


def main(wanted: Sequence[int]) -> None:
    """Prints one JSON object. wanted: numbers of threads beside 1; as many as there are processors when empty."""
    processors = len(os.sched_getaffinity(0))
    threads = sorted({1, *(wanted or [processors])})
    own = [steps() for _ in range(threads[-1])]
    rates = {name: [rate([each[name] for each in own[:count]]) for count in threads] for name in own[0]}
    noise, words = Buffer(CHUNK_BYTES), Buffer(CHUNK_BYTES)
    noise.view[:], words.view[:] = os.urandom(CHUNK_BYTES), text()
    share = squeeze(words, 0, CHUNK_BYTES, Buffer(CHUNK_BYTES)) / CHUNK_BYTES
    costs = {name: cost(work) for name, work in own[0].items()}
    always = costs["memcpy"] + costs["cuts"] + costs["id"]
    limits = {
        "noise": always + costs["LZ4 of noise (sample only)"] + costs["AES-256-GCM"],
        "words": always + costs["LZ4 of words"] + costs["AES-256-GCM"] * share,
    }
    ratios = {}
    for name, content in (("noise", noise), ("words", words)):
        rounds = [[path(content, count) for count in threads] for _ in range(ROUNDS)]
        rates[f"seal path, {name}"] = [statistics.median(each[n][0] for each in rounds) for n in range(len(threads))]
        ratios[f"seal path of {name}: limit / CPU time"] = limits[name] / min(each[0][1] for each in rounds)
    with memory() as source:
        for name, library in (("in C", native.library), ("in Python", None)):
            if name == "in C" and library is None:
                continue  # not installed, or does not pay here
            with mock.patch.object(native, "library", library):
                found_rates = [[whole(source, count) for count in threads] for _ in range(3)]
            rates[f"memory to packs, noise, {name}"] = [max(each) for each in zip(*found_rates, strict=True)]
    pairs = []
    for _ in range(ROUNDS):
        tried = path(noise, processors)[1]
        with mock.patch("gpucr_hpc.image.packs.squeeze", return_value=0):
            pairs.append(tried / path(noise, processors)[1])
    ratios["noise: CPU time / CPU time without compression"] = statistics.median(pairs)
    found = {"threads": threads, "rates": rates, "ratios": ratios}
    print(json.dumps(found | {"sample_bytes": 4 * SAMPLE_BYTES, "words_stored": share}))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
