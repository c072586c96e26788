"""Words that every layer shares: ids, and what a checkpoint's manifest says. No I/O.

Who calls: image and store (names, manifest), engine and agent (fill a Manifest), restore (reads it).
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from gpucr_hpc.errors import UsageError

#: Version of everything under one checkpoint: manifest, index, packs. docs/format.md lists the changes.
FORMAT_VERSION = 2
#: Versions that this release reads.
READABLE_VERSIONS = (1, 2)

JobId: TypeAlias = str
CheckpointId: TypeAlias = str
Json: TypeAlias = dict[str, Any]

_JOB_ID = re.compile(r"[0-9]{1,20}")
_CHECKPOINT_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{4}")
_OBJECT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_job_id(text: str) -> JobId:
    """The same text when it is a job id (digits only); UsageError otherwise."""
    if not _JOB_ID.fullmatch(text):
        raise UsageError(reason=f"{text!r} is not a job id")
    return text


def check_checkpoint_id(text: str) -> CheckpointId:
    """The same text when it is a checkpoint id; UsageError otherwise."""
    if not is_checkpoint_id(text):
        raise UsageError(reason=f"{text!r} is not a checkpoint id")
    return text


def is_checkpoint_id(text: str) -> bool:
    """True for text such as 20261127T232501Z-3f9a."""
    return _CHECKPOINT_ID.fullmatch(text) is not None


def check_object_name(text: str) -> str:
    """The same text when it may name a stream or a file of a store; UsageError otherwise.

    Allowed: 1 to 200 of A-Z a-z 0-9 . _ - with no leading dot. CRIU's file names fit.
    """
    if not _OBJECT_NAME.fullmatch(text):
        raise UsageError(reason=f"{text!r} is not a valid name: want letters, digits, '.', '_', '-'")
    return text


def new_checkpoint_id(now: float | datetime | None = None) -> CheckpointId:
    """An id that sorts by time as text: UTC to the second, then the fraction in 1/65536 s as four hex digits.

    now: seconds since the epoch or an aware datetime; None means now. Two ids of one job differ when they
    are made 16 microseconds apart; a store refuses the second of two equal ones.
    """
    moment = time.time() if now is None else now.timestamp() if isinstance(now, datetime) else now
    whole = int(moment // 1)
    fraction = int((moment - whole) * 65536) & 0xFFFF
    return f"{datetime.fromtimestamp(whole, UTC):%Y%m%dT%H%M%SZ}-{fraction:04x}"


def rfc3339(now: float | datetime | None = None) -> str:
    """UTC time such as 2026-11-27T23:25:01Z; arguments as new_checkpoint_id."""
    moment = time.time() if now is None else now.timestamp() if isinstance(now, datetime) else now
    return f"{datetime.fromtimestamp(int(moment // 1), UTC):%Y-%m-%dT%H:%M:%SZ}"


def canonical_json(value: Any) -> bytes:
    """The one encoding that is signed: keys sorted, no spaces, UTF-8, no NaN. What is no UTF-8 in a file's name, which
    Python has as a lone surrogate, is written as JSON's escape of that.

    Raises ValueError, TypeError.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace")


@dataclass(frozen=True)
class PackEntry:
    """One stored object of an image.

    sha256, hex: of an index, over the whole object; of a pack, over its header and the authentication tags
    of its chunks in the order of their offsets (not over the file: hashing it would cost more than all else,
    and the tags already stand for every byte).
    """

    name: str
    size_bytes: int
    sha256: str

    def as_dict(self) -> Json:
        """JSON form, read back by from_dict."""
        return {"name": self.name, "size_bytes": self.size_bytes, "sha256": self.sha256}

    @classmethod
    def from_dict(cls, value: object) -> PackEntry:
        """Raises ValueError for anything but what as_dict made."""
        table = _table(value, {"name", "size_bytes", "sha256"}, "pack")
        entry = cls(_text(table, "name"), _count(table, "size_bytes"), _text(table, "sha256"))
        if not _OBJECT_NAME.fullmatch(entry.name) or not _DIGEST.fullmatch(entry.sha256):
            raise ValueError(f"pack {entry.name!r}: not a valid name or digest")
        return entry


@dataclass(frozen=True)
class LinkedPack:
    """A pack of an earlier image, as it lies beside the image that refers to it. number: its own, in that image."""

    number: int
    name: str
    size_bytes: int

    def as_dict(self) -> Json:
        """JSON form, read back by from_dict."""
        return {"number": self.number, "name": self.name, "size_bytes": self.size_bytes}

    @classmethod
    def from_dict(cls, value: object) -> LinkedPack:
        """Raises ValueError for anything but what as_dict made."""
        table = _table(value, {"number", "name", "size_bytes"}, "linked pack")
        pack = cls(_count(table, "number"), _text(table, "name"), _count(table, "size_bytes"))
        if not _OBJECT_NAME.fullmatch(pack.name):
            raise ValueError(f"linked pack {pack.name!r}: not a valid name")
        return pack


@dataclass(frozen=True)
class Source:
    """An earlier image of the job, of which an image holds packs: where they were sealed. salt: as in ImageEntry."""

    checkpoint: CheckpointId
    node_rank: int
    salt: str
    packs: list[LinkedPack]

    def as_dict(self) -> Json:
        """JSON form, read back by from_dict."""
        return {
            "checkpoint": self.checkpoint,
            "node_rank": self.node_rank,
            "salt": self.salt,
            "packs": [pack.as_dict() for pack in self.packs],
        }

    @classmethod
    def from_dict(cls, value: object) -> Source:
        """Raises ValueError for anything but what as_dict made."""
        table = _table(value, {"checkpoint", "node_rank", "salt", "packs"}, "source")
        source = cls(
            checkpoint=_text(table, "checkpoint"),
            node_rank=_count(table, "node_rank"),
            salt=_text(table, "salt"),
            packs=[LinkedPack.from_dict(pack) for pack in _list(table, "packs")],
        )
        numbers = [pack.number for pack in source.packs]
        if not is_checkpoint_id(source.checkpoint) or not _DIGEST.fullmatch(source.salt):
            raise ValueError("source: checkpoint id or salt is not valid")
        if numbers != sorted(set(numbers)):
            raise ValueError("source: packs are not in order")
        return source


@dataclass(frozen=True)
class ImageEntry:
    """The image of one capsule, as ImageWriter.finish returns it.

    salt: hex, random, makes the keys of each image differ. bytes_plain: sum of the streams. bytes_stored: own
    packs and index together, what this image added to the store. streams: number of streams. node: where it was
    written, for people only. sources: earlier images that it refers to. depth: 0 for an image that stands for
    itself, else one more than that of the image it was compared with.
    """

    node_rank: int
    node: str
    salt: str
    index: PackEntry
    packs: list[PackEntry]
    bytes_plain: int
    bytes_stored: int
    streams: int
    sources: list[Source] = field(default_factory=list)
    depth: int = 0
    format: int = FORMAT_VERSION

    @property
    def bytes_linked(self) -> int:
        """Size of the packs of earlier images that this one holds, in bytes."""
        return sum(pack.size_bytes for source in self.sources for pack in source.packs)

    def as_dict(self) -> Json:
        """JSON form, read back by from_dict."""
        table = {
            "node_rank": self.node_rank,
            "node": self.node,
            "salt": self.salt,
            "index": self.index.as_dict(),
            "packs": [pack.as_dict() for pack in self.packs],
            "bytes_plain": self.bytes_plain,
            "bytes_stored": self.bytes_stored,
            "streams": self.streams,
        }
        if self.format > 1:
            table |= {"sources": [source.as_dict() for source in self.sources], "depth": self.depth}
        return table

    @classmethod
    def from_dict(cls, value: object) -> ImageEntry:
        """Raises ValueError for anything but what as_dict made."""
        version = 2 if "sources" in _plain_table(value) else 1
        counts = ("node_rank", "bytes_plain", "bytes_stored", "streams", *(("depth",) if version > 1 else ()))
        later = ("sources",) if version > 1 else ()
        table = _table(value, {"node", "salt", "index", "packs", *counts, *later}, "image")
        entry = cls(
            node_rank=_count(table, "node_rank"),
            node=_text(table, "node"),
            salt=_text(table, "salt"),
            index=PackEntry.from_dict(table["index"]),
            packs=[PackEntry.from_dict(pack) for pack in _list(table, "packs")],
            bytes_plain=_count(table, "bytes_plain"),
            bytes_stored=_count(table, "bytes_stored"),
            streams=_count(table, "streams"),
            sources=[Source.from_dict(source) for source in _list(table, "sources")] if version > 1 else [],
            depth=_count(table, "depth") if version > 1 else 0,
            format=version,
        )
        if not _DIGEST.fullmatch(entry.salt):
            raise ValueError("image: salt is not 64 hex digits")
        return entry

    def names(self) -> list[str]:
        """Names of all its files."""
        linked = [pack.name for source in self.sources for pack in source.packs]
        return [pack.name for pack in (*self.packs, self.index)] + linked


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint consists of and what it needs; signed as a whole.

    created: RFC 3339, UTC. reason: "preempt", "demand", ... run: Slurm's restart count of the run that was
    dumped. images: by node rank. slots: the data key, wrapped once per recipient (DataKey.wrap). meta: the
    engine's own section (CRIU version, kernel, CPU flags, root pid, open files, ...); JSON only.
    """

    format: int = FORMAT_VERSION
    checkpoint: CheckpointId
    job: JobId
    uid: int
    gid: int
    created: str = field(default_factory=rfc3339)
    reason: str
    run: int
    images: list[ImageEntry]
    slots: list[Json]
    meta: Json = field(default_factory=dict)

    @property
    def bytes_plain(self) -> int:
        """Plain bytes of all images."""
        return sum(image.bytes_plain for image in self.images)

    @property
    def bytes_stored(self) -> int:
        """Stored bytes of all images, without the manifest."""
        return sum(image.bytes_stored for image in self.images)

    def image(self, node_rank: int) -> ImageEntry:
        """The image of a node rank. Raises UsageError when the checkpoint has none."""
        for entry in self.images:
            if entry.node_rank == node_rank:
                return entry
        raise UsageError(reason=f"checkpoint {self.checkpoint} has no image of node rank {node_rank}")

    def rank(self, node_rank: int) -> Json:
        """What the engine noted of a node rank: meta's `ranks` are in the order of the images."""
        ranks: list[Json] = self.meta["ranks"]
        return ranks[self.images.index(self.image(node_rank))]

    def of_node(self, node_rank: int) -> Manifest:
        """The part of it that one node needs for its restore: what all nodes together get sent grows as their number,
        not as its square."""
        meta = self.meta | {"ranks": [self.rank(node_rank)]}
        return replace(self, images=[self.image(node_rank)], meta=meta)

    def as_dict(self) -> Json:
        """JSON form, read back by from_dict."""
        return {
            "format": self.format,
            "checkpoint": self.checkpoint,
            "job": self.job,
            "uid": self.uid,
            "gid": self.gid,
            "created": self.created,
            "reason": self.reason,
            "run": self.run,
            "images": [image.as_dict() for image in self.images],
            "slots": self.slots,
            "meta": self.meta,
        }

    @classmethod
    def from_dict(cls, value: object) -> Manifest:
        """Raises ValueError for anything but what as_dict made; every id and name in it is then valid."""
        counts = ("format", "uid", "gid", "run")
        texts = ("checkpoint", "job", "created", "reason")
        table = _table(value, {*counts, *texts, "images", "slots", "meta"}, "manifest")
        manifest = cls(
            **{name: _count(table, name) for name in counts},  # type: ignore[arg-type]
            **{name: _text(table, name) for name in texts},  # type: ignore[arg-type]
            images=[ImageEntry.from_dict(image) for image in _list(table, "images")],
            slots=[_plain_table(slot) for slot in _list(table, "slots")],
            meta=_plain_table(table["meta"]),
        )
        if not is_checkpoint_id(manifest.checkpoint) or not _JOB_ID.fullmatch(manifest.job):
            raise ValueError("manifest: job or checkpoint id is not valid")
        ranks = [image.node_rank for image in manifest.images]
        names = [name for image in manifest.images for name in image.names()]
        if ranks != sorted(set(ranks)) or len(names) != len(set(names)):
            raise ValueError("manifest: images are not in order or share a file")
        if any(image.format != manifest.format for image in manifest.images):
            raise ValueError("manifest: an image has the form of another format version")
        return manifest


def _table(value: object, keys: set[str], what: str) -> Json:
    table = _plain_table(value)
    if table.keys() != keys:
        odd = sorted(set(table) ^ keys)[0]
        raise ValueError(f"{what}: key {odd!r} is {'unknown' if odd in table else 'missing'}")
    return table


def _plain_table(value: object) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"want a JSON object, found {type(value).__name__}")
    return value


def _list(table: Json, key: str) -> list[Any]:
    if not isinstance(table[key], list):
        raise ValueError(f"{key}: want a JSON array")
    return list(table[key])


def _text(table: Json, key: str) -> str:
    if not isinstance(table[key], str):
        raise ValueError(f"{key}: want a string")
    return str(table[key])


def _count(table: Json, key: str) -> int:
    if type(table[key]) is not int or not 0 <= table[key] < 1 << 63:
        raise ValueError(f"{key}: want an integer that is not negative")
    return int(table[key])
