"""Where memory is cut into chunks: by its content, at page boundaries.

Who calls: StreamWriter, for the streams that hold pages. CRIU writes the pages of a process one after another, so one
page more in the heap moves all that follow; chunks of a fixed size then have nothing in common with those of the last
image. A cut that depends on the page in front of it alone is found again wherever that page has gone: what was
measured is in docs/architecture.md.
"""

from __future__ import annotations

PAGE_BYTES = 4096
#: No chunk is shorter, except the last one of a stream.
MIN_PAGES = 16
#: One page in so many ends a chunk.
MEAN_PAGES = 61

_WORD_BYTES = 8
_WORDS = PAGE_BYTES // _WORD_BYTES


def cuts(view: memoryview, size: int) -> list[int]:
    """Offsets in the first `size` bytes, which follow a cut, at which to cut; ascending, none at 0.

    Two words of a page decide. Besides, memory that looks like zero is parted from other memory.
    """
    pages = size // PAGE_BYTES
    words = view[: pages * PAGE_BYTES].cast("Q")
    found, last, empty = [], 0, True
    pairs = zip(words[::_WORDS].tolist(), words[_WORDS // 2 :: _WORDS].tolist(), strict=True)
    for page, (one, other) in enumerate(pairs):
        was_empty, empty = empty, not (one or other)
        if was_empty != empty and page - last >= MIN_PAGES:
            found.append(page * PAGE_BYTES)
            last = page
        if not empty and (31 * one + other) % MEAN_PAGES == 0 and page + 1 - last >= MIN_PAGES:
            found.append((page + 1) * PAGE_BYTES)
            last = page + 1
    return found
