"""Where memory is cut into chunks: by its content, at page boundaries.

Who calls: parts, for the streams that hold pages. CRIU writes the pages of a process one after another, so one
page more in the heap moves all that follow; chunks of a fixed size then have nothing in common with those of the last
image. A cut that depends on the page in front of it alone is found again wherever that page has gone: what was
measured is in docs/architecture.md.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from gpucr_hpc.image import native
from gpucr_hpc.image.buffers import Buffer

PAGE_BYTES = 4096
#: No chunk is shorter, except the last one of a stream.
MIN_PAGES = 32
#: No chunk is longer: CHUNK_BYTES.
MAX_PAGES = 256
#: One page in so many ends a chunk.
MEAN_PAGES = 97

_WORD_BYTES = 8
_WORDS = PAGE_BYTES // _WORD_BYTES


def cut(buffer: Buffer | None, size: int, since: int, before: int) -> tuple[list[int], int]:
    """Where to cut the first `size` bytes of a buffer, as `cuts` says, and the mark of the last page, or 1."""
    if buffer is None or size < PAGE_BYTES:
        return cuts([], since, before), 1
    if native.library is not None:
        return native.library.cut(buffer.address, size // PAGE_BYTES, since, before)
    found = marks(buffer.view[:size])
    return cuts(found, since, before), found[-1]


def marks(view: memoryview) -> list[int]:
    """A number for each whole page, by which cuts are decided: of two of its words; 0 looks like zero."""
    table = view[: len(view) // PAGE_BYTES * PAGE_BYTES].cast("Q")
    return list(map(operator.add, table[::_WORDS].tolist(), table[_WORDS // 2 :: _WORDS].tolist()))


def cuts(marks: Sequence[int], since: int = 0, before: int = 1) -> list[int]:
    """Numbers of the pages at whose beginning, or at whose end for the last one, to cut; ascending.

    since: pages behind the last cut that come before these, and, if there are any, the mark of the last of them in
    `before`. So pages that come in several parts are cut as they would be in one. Memory that looks like zero is
    parted from other memory.
    """
    places = [page for page, mark in enumerate(marks, 1) if mark % MEAN_PAGES == 1]
    if 0 in marks or not before:
        empty = [not mark for mark in marks]
        places += [page for page in range(1, len(marks)) if empty[page] != empty[page - 1]]
        if since and marks and empty[0] == bool(before):
            places.append(0)
        places.sort()
    found, last = [], -since
    for page in places:
        while page - last > MAX_PAGES:
            last += MAX_PAGES
            found.append(last)
        if page - last >= MIN_PAGES:
            found.append(page)
            last = page
    while len(marks) - last >= MAX_PAGES:
        last += MAX_PAGES
        found.append(last)
    return found
