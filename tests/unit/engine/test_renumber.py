"""The dumped holder under another number: its files, and the tree."""

from __future__ import annotations

import struct

import pytest

from gpucr_hpc.engine import protobuf, renumber, restore
from gpucr_hpc.errors import ImageError

MAGIC = b"MAGIC..."
FILES = ("core-2.img", "mm-2.img", "ids-2.img", "pagemap-2.img", "core-21.img", "fdinfo-2.img", "pages-2.img")


def tree(*processes: tuple[int, int, int, int, list[int]]) -> bytes:
    fields = (1, 2, 3, 4)
    return MAGIC + b"".join(
        protobuf.encode_pairs([*zip(fields, process[:4], strict=True), *((5, t) for t in process[4])])
        for process in processes
    )


class Image:
    """The names and small files of an image, as ImageReader gives them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def names(self) -> list[str]:
        return list(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]


def test_only_files_named_by_the_process_change_their_name():
    """A table or a pages file of the same number stays."""
    image = Image(dict.fromkeys(FILES, b"") | {"pstree.img": tree((2, 0, 2, 2, [2]))})
    found = renumber.renumber(image, 2, 900)  # type: ignore[arg-type]
    assert {f"{kind}-900.img": f"{kind}-2.img" for kind in ("core", "mm", "ids", "pagemap")} == found.names
    assert [(900, 0, 900, 900, [900])] == [
        (*(m[n][0] for n in (1, 2, 3, 4)), m[5]) for m in protobuf.messages(found.tree["pstree.img"], "")
    ]


def test_children_follow_and_all_else_stays():
    """Parents are renamed; threads, groups and sessions of others are what they were, and so are unknown fields."""
    before = tree((2, 0, 2, 2, [2]), (3, 2, 3, 3, [3, 20]), (4, 3, 22, 222, [4]))
    before += protobuf.encode_pairs([(1, 5), (2, 2), (3, 5), (4, 5), (5, 5), (6, 2), (7, b"2")])
    after = tree((9, 0, 9, 9, [9]), (3, 9, 3, 3, [3, 20]), (4, 3, 22, 222, [4]))
    after += protobuf.encode_pairs([(1, 5), (2, 9), (3, 5), (4, 5), (5, 5), (6, 2), (7, b"2")])
    assert after == renumber.in_tree(before, 2, 9)
    assert before == renumber.in_tree(after, 9, 2)


def test_same_number_changes_nothing():
    image = Image({"core-2.img": b"", "pstree.img": b"not to be read"})
    assert renumber.Renumbered({}, {}) == renumber.renumber(image, 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [MAGIC + b"\x05", MAGIC + struct.pack("<I", 9) + b"\x08"])
def test_damage_is_an_error_of_the_image(data):
    with pytest.raises(ImageError):
        renumber.in_tree(data, 2, 9)


@pytest.mark.parametrize(
    ("root", "highest", "wanted"),
    [(2, 40, (2, 41, 104)), (108, 500, (108, 501, 564)), (301, 500, (0, 301, 564))],
)
def test_numbers_of_a_restore(root, highest, wanted):
    """The holder keeps its number, the dumped one gets a free one; a number that CRIU's helpers may have is left."""
    meta = {"tree": {"root": root, "max_pid": highest}}
    found = restore.pids(meta)
    assert wanted == (found.holder, found.old_holder, found.above)
    assert [root, wanted[1]] == restore.in_image(meta)
