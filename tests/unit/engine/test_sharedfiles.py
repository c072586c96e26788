"""A file to which several nodes write has one size for all of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.engine import protobuf
from gpucr_hpc.engine.sharedfiles import agree, in_table
from gpucr_hpc.errors import ImageError

MAGIC = b"magic..!"


def table(*entries: dict[int, int | bytes]) -> bytes:
    """files.img with regular files, and between them something else."""
    other = protobuf.encode_pairs([(1, 4), (2, 9), (5, b"\x08\x09")])
    regular = [protobuf.encode_pairs([(1, 1), (2, 7), (3, protobuf.encode_pairs(e.items())[4:])]) for e in entries]
    return MAGIC + other + b"".join(regular) + other


def file(path: str, size_bytes: int, identity: str = "1") -> dict[str, Any]:
    return {"path": path, "size_bytes": size_bytes, "flags": 1, "identity": identity, "shared": False}


def test_the_largest_size_holds_for_all_who_have_it() -> None:
    first = [file("/d/log", 10), file("/d/own", 5), file("/local/x", 7, "a:1")]
    second = [file("/d/log", 30), file("/local/x", 9, "b:1")]
    agree([first, second, [file("/d/log", 20)]])
    assert [(f["size_bytes"], f["shared"]) for f in first] == [(30, True), (5, False), (7, False)]
    assert [(f["size_bytes"], f["shared"]) for f in second] == [(30, True), (9, False)]


def test_one_node_that_has_a_file_twice_shares_it_with_nobody() -> None:
    files = [file("/d/log", 10), file("/d/log", 11)]
    agree([files])
    assert not any(f["shared"] for f in files)


@given(st.integers(0, 1 << 62), st.binary(max_size=20), st.integers(0, (1 << 64) - 1))
def test_nothing_else_is_changed(size: int, more: bytes, position: int) -> None:
    """Byte for byte, also what has no size, and names that are no UTF-8."""
    name = b"/d/caf\xe9"
    before = table({1: 7, 3: position, 6: name, 8: 5, 12: more}, {1: 8, 6: b"/d/other", 8: 6}, {1: 9, 6: name})
    wanted = table({1: 7, 3: position, 6: name, 8: size, 12: more}, {1: 8, 6: b"/d/other", 8: 6}, {1: 9, 6: name})
    assert in_table(before, {os.fsdecode(name): size}) == wanted
    assert in_table(before, {"/d/else": size}) == before


@pytest.mark.parametrize("data", [b"\xff\xff\xff\x7f", b"\x02\0\0\0\x1a\x7f", b"\x02\0\0\0\x18\x01"])
def test_a_table_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(ImageError, match="cannot be read"):
        in_table(MAGIC + data, {"/d/log": 1})
