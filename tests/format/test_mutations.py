"""Mutated and truncated packs, indexes and manifests: none is accepted, none crashes, each error says where.

Seeded. GPUCR_TEST_MUTATIONS says how many (5000 by default, 100000 for a release); GPUCR_TEST_SEED which.
"""

from __future__ import annotations

import copy
import os
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from image_samples import CHECKPOINT, OTHER, SIGNING, Checkpoint

from gpucr_hpc.errors import FormatUnknown, IntegrityError, SignatureError
from gpucr_hpc.image import layout
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.manifest import decode

COUNT = int(os.environ.get("GPUCR_TEST_MUTATIONS", "5000"))
SEED = int(os.environ.get("GPUCR_TEST_SEED", "20261128"))
MANIFEST, INDEX, PACKS = "manifest", "r0000.index", ("r0000-p00.pack", "r0000-p01.pack")
_CHUNK = re.compile(r"at byte (\d+)")

Mutation = Callable[[random.Random, bytes, list[bytes]], bytes]


def flip_bit(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def set_bytes(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 16, 64))
    fill = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return data[:at] + fill[: len(data) - at] + data[at + size :]


def truncate(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: rng.choice((rng.randrange(len(data)), rng.randrange(min(len(data), 200)), len(data) - 1))]


def extend(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data + rng.choice((b"\0", rng.randbytes(rng.randrange(1, 100)), data))


def delete(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 64) :]


def insert(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:]


def move(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """Exchange two ranges of one size."""
    size = rng.randrange(1, max(2, len(data) // 3))
    one = rng.randrange(len(data) - 2 * size + 1)
    two = rng.randrange(one + size, len(data) - size + 1)
    a, b = data[one : one + size], data[two : two + size]
    return data[:one] + b + data[one + size : two] + a + data[two + size :]


def head_field(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """Another number in a field of a head: version, rank, lengths."""
    at, size = rng.choice(((8, 2), (10, 2), (12, 2), (14, 2), (16, 8), (64, 8), (0, 8)))
    value = rng.choice((0, 1, 2, 3, 0xFFFF, (1 << 8 * size) - 1, rng.getrandbits(8 * size))) & (1 << 8 * size) - 1
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


def graft(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A range, or everything, of another file: of this checkpoint, or of another one with the same keys."""
    other = rng.choice(others)
    if rng.randrange(4) == 0:
        return other
    at = rng.randrange(min(len(data), len(other)))
    size = rng.randrange(1, 400)
    return data[:at] + other[at : at + size] + data[at + size :]


MUTATIONS: list[Mutation] = [flip_bit, set_bytes, truncate, extend, delete, insert, move, head_field, graft]


def sample(checkpoint: str, base: Checkpoint | None = None) -> Checkpoint:
    """Raw, compressed and zero chunks; with a base also references to it."""
    rng = random.Random(checkpoint)
    content = {"a.img": rng.randbytes(700), "b.img": b"text " * 200, "c.img": bytes(9), "d.img": rng.randbytes(5000)}
    kept = {} if base is None else {"kept.img": base.content["d.img"], "too.img": base.content["a.img"]}
    return Checkpoint(content | kept, DataKey.generate(b"i" * 32), checkpoint=checkpoint, base=base)


def files_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return checkpoint.files | {MANIFEST: checkpoint.signed()}


def read(checkpoint: Checkpoint, files: dict[str, bytes]) -> dict[str, bytes]:
    """Everything as a restore takes it: manifest, image, every chunk."""
    manifest = decode(files[MANIFEST], MANIFEST, [SIGNING.public], job="41", checkpoint=CHECKPOINT)
    found = copy.copy(checkpoint)
    found.files = files
    return found.read_all(entry=manifest.images[0])


def chunk_around(checkpoint: Checkpoint, pack: str, at: int) -> int | None:
    """Offset of the chunk that lies over a byte of a pack."""
    number = [part.name for part in checkpoint.entry.packs].index(pack)
    with checkpoint.reader() as reader:
        for stream in reader.index.streams.values():
            for sequence in range(len(stream)):
                chunk = stream.chunk(sequence)
                if chunk.pack == number and chunk.stored and chunk.offset <= at < chunk.offset + chunk.stored:
                    return chunk.offset
    return None


@pytest.fixture(scope="module")
def subject() -> tuple[Checkpoint, dict[str, bytes], list[bytes]]:
    other = sample(OTHER)
    one = sample(CHECKPOINT, base=other)
    assert [f"{OTHER}.{PACKS[0]}", f"{OTHER}.{PACKS[1]}"] == [p.name for p in one.entry.sources[0].packs]
    files = files_of(one)
    assert one.content == read(one, files)
    return one, files, [*files.values(), *files_of(other).values()]


def refusal(checkpoint: Checkpoint, files: dict[str, bytes], what: str) -> Exception:
    try:
        read(checkpoint, files)
    except (IntegrityError, FormatUnknown, SignatureError) as error:
        return error
    except Exception as error:
        pytest.fail(f"{what}: {error!r}")
    pytest.fail(f"{what}: accepted")


def test_mutations(subject):
    """Whatever is done to one file: refused, with the file's name."""
    checkpoint, files, others = subject
    rng, outcomes = random.Random(SEED), Counter()
    for number in range(COUNT):
        name, mutate = rng.choice(sorted(files)), rng.choice(MUTATIONS)
        data = mutate(rng, files[name], others)
        if data == files[name]:
            outcomes["same"] += 1
            continue
        what = f"seed {SEED}, mutation {number}: {mutate.__name__} of {name}"
        error = refusal(checkpoint, files | {name: data}, what)
        assert str(error).startswith(name), f"{what}: the error names another file: {error}"
        outcomes[type(error).__name__] += 1
    assert outcomes["same"] < COUNT / 20, "most mutations must change something"
    assert {"IntegrityError", "FormatUnknown", "SignatureError"} <= set(outcomes), outcomes


def test_damage_in_a_chunk_is_named_with_its_place(subject):
    """A flipped bit of a pack's body is reported with the offset of the chunk that it is in."""
    checkpoint, files, _ = subject
    rng = random.Random(SEED)
    for _number in range(min(COUNT, 300)):
        pack = rng.choice([part.name for part in checkpoint.entry.packs])
        at = rng.randrange(layout.HEADER_BYTES, len(files[pack]))
        data = bytearray(files[pack])
        data[at] ^= 1 << rng.randrange(8)
        with pytest.raises(IntegrityError) as caught:
            read(checkpoint, files | {pack: bytes(data)})
        found = _CHUNK.search(str(caught.value))
        assert found and chunk_around(checkpoint, pack, at) == int(found[1]), str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, *PACKS, f"{OTHER}.{PACKS[0]}"])
def test_every_truncation(subject, name):
    """A file that ends anywhere, also at no byte at all, is refused by name."""
    checkpoint, files, _ = subject
    for size in range(len(files[name])):
        with pytest.raises((IntegrityError, FormatUnknown, SignatureError), match=f"^{name}"):
            read(checkpoint, files | {name: files[name][:size]})
