"""An earlier image of the job, in whose packs a new image need not store again what did not change.

Who calls: the worker (Base, before the freeze), the writer (find, take). The packs of the earlier image are hard links
in the new checkpoint's directory from the beginning, so that whoever removes the earlier checkpoint meanwhile, or
ever, takes nothing from the new one: the file system counts the references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from gpucr_hpc.errors import GpucrError, UsageError
from gpucr_hpc.image import layout
from gpucr_hpc.image.chunks import ChunkKind
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.model import LinkedPack, Source

#: Chunks that are looked for, at most: 512 GiB of memory. More only cost space.
MAX_KNOWN = 1 << 19


@dataclass(frozen=True)
class Kept:
    """A source of a new image, with the key of the image in which its packs are."""

    source: Source
    key: bytes


class Base:
    """What a new image can refer to. Opening it reads the earlier index and links its packs.

    link(name, new name): hard link of a file of the earlier checkpoint; remove(new name): take it back. records: by
    id, as they stand in the new index before unused sources have gone. Raises UsageError when the earlier image
    cannot be referred to (older format, too many sources, a key without ids), StoreError when its packs cannot be
    linked; no link is left then, and the new image is written in full.
    """

    def __init__(
        self,
        earlier: ImageReader,
        link: Callable[[str, str], None],
        remove: Callable[[str], None],
    ) -> None:
        entry, index = earlier.entry, earlier.index
        if entry.format < 2 or len(entry.sources) >= layout.MAX_SOURCES:
            raise UsageError(reason=f"checkpoint {earlier.checkpoint} is of an older format or has too many sources")
        if earlier.ids is None:
            raise UsageError(reason=f"checkpoint {earlier.checkpoint} was opened without its id key")
        self.ids = earlier.ids
        self.depth = entry.depth + 1
        self._remove = remove
        own = [
            LinkedPack(number, layout.linked_name(earlier.checkpoint, entry.node_rank, number), pack.size_bytes)
            for number, pack in enumerate(entry.packs)
        ]
        names = {pack.name: linked.name for pack, linked in zip(entry.packs, own, strict=True)}
        names |= {pack.name: pack.name for source in entry.sources for pack in source.packs}
        self._link_all(names, link)
        nearest = Source(earlier.checkpoint, entry.node_rank, entry.salt, own)
        self._sources = [
            Kept(nearest, earlier.key),
            *(Kept(source, key) for source, key in zip(entry.sources, index.keys, strict=True)),
        ]
        self.records: dict[bytes, bytes] = {}
        for stream in index.streams.values():
            for record in layout.RECORD.iter_unpack(stream.records):
                offset, stored, plain, pack_number, source_number, kind, tag, name_of = record
                if kind != ChunkKind.ZERO and len(self.records) < MAX_KNOWN:
                    self.records[name_of] = layout.RECORD.pack(
                        offset, stored, plain, pack_number, source_number + 1, kind, tag, name_of
                    )

    def _link_all(self, names: dict[str, str], link: Callable[[str, str], None]) -> None:
        made = []
        try:
            for name, new_name in names.items():
                link(name, new_name)
                made.append(new_name)
        except GpucrError:
            for new_name in made:
                self._remove(new_name)
            raise

    def take(self, used: set[tuple[int, int]]) -> tuple[list[Kept], dict[int, int]]:
        """Keep the links to packs that are used (source, pack) and remove the others.

        Returns the sources that remain, in order, and their new numbers by the old ones.
        """
        kept, numbers = [], {}
        for number, each in enumerate(self._sources, 1):
            packs = [pack for pack in each.source.packs if (number, pack.number) in used]
            for pack in each.source.packs:
                if pack not in packs:
                    self._remove(pack.name)
            if packs:
                kept.append(Kept(dataclasses.replace(each.source, packs=packs), each.key))
                numbers[number] = len(kept)
        return kept, numbers
