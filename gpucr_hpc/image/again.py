"""A part of a stream that was sealed before, from memory that may have changed since.

Who calls: streams. Only the marks of its chunks are asked for, which costs a fraction of reading and cutting them: a
chunk whose mark makes the id of its record is what that record holds. One that has changed is read and sealed as it is
now.
"""

from __future__ import annotations

from collections.abc import Callable

from gpucr_hpc.image.extents import Sealed
from gpucr_hpc.image.packs import Piece
from gpucr_hpc.image.parts import Means, Part


class Again(Part):
    """`size` bytes that were sealed. before, keep, put: as Part has them."""

    def __init__(
        self,
        means: Means,
        size: int,
        sealed: Sealed,
        *,
        before: Part | None,
        keep: Callable[[int], int],
        put: Callable[[int, bytes], None],
    ) -> None:
        super().__init__(means, size, None, before=before, keep=keep, put=put, pages=True, last=True)
        self._fetched.clear()
        self._sealed: Sealed | None = sealed
        self._records = list(sealed.records)

    def fetch(self) -> None:
        """Compare, and seal again what is another. A failure is the image's. Twice is fine."""
        sealed, self._sealed = self._sealed, None
        if sealed is None:
            return
        try:
            self._means.check()
            self._compare(sealed)
        except Exception as error:
            self._means.fail(error)
        finally:
            self._fetched.set()

    def _compare(self, sealed: Sealed) -> None:
        packs = self._means.packs
        marks = sealed.marks(packs.mark_key, sealed.places)
        for number, (mark, (position, size)) in enumerate(zip(marks, sealed.places, strict=True)):
            if packs.is_chunk(self._records[number], mark, size):
                continue
            buffer = self._means.buffers.take()
            try:
                sealed.read([(position, size)], buffer.view[:size])
                self._records[number] = packs.store([Piece(buffer, 0, size, size, buffer)])
            finally:
                self._means.buffers.give(buffer)

    def _cut(self) -> None:
        self._number = self._keep(len(self._records))

    def seal(self) -> None:
        """Have its records put; a failure is the image's."""
        try:
            self._settle()
            self._means.check()
            self._put(self._number, b"".join(self._records))
        except Exception as error:
            self._means.fail(error)

    def drop(self) -> None:
        """It comes too late: nobody will compare it."""
        self._sealed = None
        self._fetched.set()
