"""Pages that CRIU's stream may get wrong are found in the image and replaced."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from criu_image import image, message

from gpucr_hpc.engine import pagemap
from gpucr_hpc.errors import ImageError
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore


def pagemap_of(*entries: dict[int, int]) -> bytes:
    return image(*map(message, ({1: 7}, *entries)))


def test_pages_are_counted_in_the_order_of_the_file():
    """Runs that the image does not hold (no PRESENT flag, or in a parent) take no room in the pages file."""
    mapped = pagemap.parse(
        pagemap_of(
            {1: 0x400000, 4: 4, 5: 2},
            {1: 0x500000, 4: 2, 5: 100},
            {1: 0x600000, 3: 1, 4: 4, 5: 50},
            {1: 0x7FFFF0000000, 2: 3, 4: 4},
        )
    )
    assert mapped.pages_id == 7
    assert mapped.offset(0x401000) == 4096
    assert mapped.offset(0x500000) is None
    assert mapped.offset(0x600000) is None
    assert mapped.offset(0x7FFFF0002000) == 4 * 4096
    assert mapped.offset(0x7FFFF0003000) is None


@pytest.mark.parametrize(
    "data", [b"", b"12345678", pagemap_of()[:-1], pagemap_of({1: 1})[:-1], b"\0" * 8 + b"\xff\xff\xff\xff"]
)
def test_damaged_pagemap_is_refused(data: bytes):
    with pytest.raises(ImageError):
        pagemap.parse(data)


def test_first_page_of_every_executable_mapping():
    """Of a living process: its program, its libraries and the vdso, nothing that is only data."""
    program = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # before that it may not have got its program's mappings yet
        text = Path(f"/proc/{child.pid}/maps").read_text()
        child.communicate(b"\n")
    executable = [line for line in text.splitlines() if line.split()[1][2] == "x" and "[vsyscall]" not in line]
    assert pagemap.injected_pages(text) == [int(line.split("-")[0], 16) for line in executable]
    assert len(executable) > 1


def test_patches_take_the_place_of_streamed_bytes(tmp_path: Path):
    """Within a chunk, over the border of two, at the end; the rest stays."""
    store, key = MemoryStore(), DataKey.generate()
    staging = store.begin("1", "20261128T000000Z-0000")
    writer = ImageWriter(staging.create, checkpoint="20261128T000000Z-0000", node_rank=0, key=key)
    data = os.urandom(3 << 20)
    with writer.stream("pages-1.img") as stream:
        stream.write(data)
    entry = writer.finish()
    files = {p.name: staging.open(p.name).read() for p in (*entry.packs, entry.index)}
    patches = pagemap.decode_patches(
        pagemap.encode_patches({"pages-1.img": [(5, b"abc"), ((1 << 20) - 2, b"0123"), (len(data) - 1, b"z")]})
    )
    expected = bytearray(data)
    for offset, new in patches["pages-1.img"]:
        expected[offset : offset + len(new)] = new
    with (
        ImageReader(lambda name: io.BytesIO(files[name]), entry, checkpoint="20261128T000000Z-0000", key=key) as reader,
        (tmp_path / "out").open("wb") as out,
    ):
        reader.copy_to_fd("pages-1.img", out.fileno(), patches["pages-1.img"])
    assert (tmp_path / "out").read_bytes() == bytes(expected)
