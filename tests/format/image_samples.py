"""One small checkpoint in memory whose files a test can damage."""

from __future__ import annotations

import dataclasses
import io
import random
from dataclasses import dataclass, field
from typing import Any

from gpucr_hpc.errors import ObjectMissing
from gpucr_hpc.image.base import Base
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.image.manifest import encode
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import ImageEntry, Manifest

CHECKPOINT = "20261127T232501Z-3f9a"
OTHER = "20261127T232502Z-0000"
SITE = SiteKey(bytes(range(32)))
SIGNING = SigningKey(bytes(range(32, 64)))


class Sink(io.BytesIO):
    """A file that puts its content into a dictionary when it is closed."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        super().__init__()
        self.files, self.path = files, name

    def close(self) -> None:
        if not self.closed:
            self.files[self.path] = self.getvalue()
        super().close()


@dataclass
class Checkpoint:
    """An image in memory with everything that is needed to read it."""

    content: dict[str, bytes]
    key: DataKey
    checkpoint: str = CHECKPOINT
    node_rank: int = 0
    packs: int = 2
    base: Checkpoint | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    entry: ImageEntry = field(init=False)

    def __post_init__(self) -> None:
        writer = ImageWriter(
            lambda name: Sink(self.files, name),
            checkpoint=self.checkpoint,
            node_rank=self.node_rank,
            key=self.key,
            packs=self.packs,
            base=None if self.base is None else self._referring(self.base),
        )
        for name, data in self.content.items():
            with writer.stream(name) as stream:
                stream.write(data)
        self.entry = writer.finish()

    def _referring(self, base: Checkpoint) -> Base:
        with base.reader() as earlier:
            return Base(earlier, lambda name, new: self.files.update({new: base.files[name]}), self.files.pop)

    def open(self, name: str) -> Any:
        if name not in self.files:
            raise ObjectMissing(path=name)
        return io.BytesIO(self.files[name])

    def reader(self, **changes: Any) -> ImageReader:
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "key": self.key, "entry": self.entry}
        values.update(changes)
        return ImageReader(self.open, values.pop("entry"), **values)

    def read_all(self, **changes: Any) -> dict[str, bytes]:
        with self.reader(**changes) as reader:
            return {name: reader.read(name) for name in reader.names()}

    def manifest(self, **changes: Any) -> Manifest:
        values: dict[str, Any] = {
            "checkpoint": self.checkpoint,
            "job": "41",
            "uid": 1000,
            "gid": 1000,
            "created": "2026-11-27T23:25:01Z",
            "reason": "preempt",
            "run": 0,
            "images": [self.entry],
            "slots": [self.key.wrap(SITE, self.checkpoint)],
            "meta": {"criu": "4.2.1", "files": [{"path": "/home/ä", "size_bytes": 7}]},
        }
        return Manifest(**(values | changes))

    def signed(self, **changes: Any) -> bytes:
        return encode(self.manifest(**changes), SIGNING)

    def resized(self, name: str, size_bytes: int) -> ImageEntry:
        """The entry as a liar would write it: with another size for one pack."""
        packs = [dataclasses.replace(p, size_bytes=size_bytes) if p.name == name else p for p in self.entry.packs]
        return dataclasses.replace(self.entry, packs=packs)


def contents(seed: int = 1) -> dict[str, bytes]:
    """Streams of every kind: empty, small, zero, compressible, raw, mixed; about 6 MiB."""
    rng = random.Random(seed)
    mib = 1 << 20
    return {
        "empty.img": b"",
        "small.img": b"seven\0!",
        "zero.img": bytes(mib + 5),
        "text.img": (b"all work and no play %d\n" % seed) * 60000,
        "raw.img": rng.randbytes(2 * mib + 77),
        "mixed.img": bytes(mib) + rng.randbytes(mib) + b"x" * mib,
    }
