"""Where memory is cut into chunks: by its content, at page boundaries.

Who calls: StreamWriter, for the streams that hold pages. CRIU writes the pages of a process one after another, so one
page more in the heap moves all that follow; chunks of a fixed size then have nothing in common with those of the last
image. A cut that depends on the page in front of it alone is found again wherever that page has gone: what was
measured is in docs/architecture.md.
"""

from __future__ import annotations

import operator

PAGE_BYTES = 4096
#: No chunk is shorter, except the last one of a stream.
MIN_PAGES = 32
#: One page in so many ends a chunk.
MEAN_PAGES = 97

_WORD_BYTES = 8
_WORDS = PAGE_BYTES // _WORD_BYTES


def cuts(view: memoryview, size: int) -> list[int]:
    """Offsets in the first `size` bytes, which follow a cut, at which to cut; ascending, none at 0.

    Two words of a page decide. Besides, memory that looks like zero is parted from other memory.
    """
    table = view[: size // PAGE_BYTES * PAGE_BYTES].cast("Q")
    words = list(map(operator.add, table[::_WORDS].tolist(), table[_WORDS // 2 :: _WORDS].tolist()))
    places = [page for page, word in enumerate(words, 1) if word % MEAN_PAGES == 1]
    if 0 in words:
        empty = [not word for word in words]
        places += [page for page in range(1, len(words)) if empty[page] != empty[page - 1]]
        places.sort()
    found, last = [], 0
    for page in places:
        if page - last >= MIN_PAGES:
            found.append(page * PAGE_BYTES)
            last = page
    return found
