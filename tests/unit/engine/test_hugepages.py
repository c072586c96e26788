"""Which mappings ask for huge pages when a job comes back, and that nothing else of CRIU's files is another."""

from __future__ import annotations

from pathlib import Path

import pytest
from criu_image import PAGE, image, message
from criu_tree import PLAIN, Mapping, Process, files_of
from test_fill import noise, stored

from gpucr_hpc.engine import fillplan, hugepages, protobuf
from gpucr_hpc.errors import ImageError

AT = 1 << 40
LEAST = 8 << 20
PAGES = LEAST // PAGE


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fillplan, "TREE_BYTES", 1)
    monkeypatch.setattr(hugepages, "LEAST_BYTES", LEAST)


def advised(*mappings: Mapping) -> dict[int, int]:
    """The advice of each mapping by its beginning, 0 without any."""
    with stored(files_of([Process(7, 0, mappings)])) as reader:
        before = reader.read("mm-7.img")
        after = hugepages.advised(reader, fillplan.make(reader, {})).get("mm-7.img", before)
    found = {}
    (one,), (other,) = list(protobuf.messages(before, "")), list(protobuf.messages(after, ""))
    assert {field: values for field, values in one.items() if field != 14} == {
        field: values for field, values in other.items() if field != 14
    }
    for old, new in zip(protobuf.parts(one, 14), protobuf.parts(other, 14), strict=True):
        assert {**old, 9: 0} == {**new, 9: 0}
        found[int(new[1][0])] = int(new.get(9, [0])[-1])
    return found


def test_what_is_full_asks_for_them():
    full, small, holes = noise(PAGES), noise(PAGES - 1), noise(PAGES * 9 // 10)
    nearly = noise(PAGES * 98 // 100)
    found = advised(
        Mapping(AT, PAGES, full),
        Mapping(AT + (1 << 30), PAGES - 1, small),
        Mapping(AT + (2 << 30), PAGES, holes),
        Mapping(AT + (3 << 30), PAGES, nearly),
        Mapping(AT + (4 << 30), PAGES, full, PLAIN | {5: 1}),
    )
    assert list(found.values()) == [1 << 14, 0, 0, 1 << 14, 0]


@pytest.mark.parametrize(
    ("before", "after"), [(1 << 10, 1 << 10 | 1 << 14), (1 << 14, 1 << 14), (1 << 15, 1 << 15), (0, 1 << 14)]
)
def test_other_advice_stays(before, after):
    """Whoever wants small pages gets them."""
    assert advised(Mapping(AT, PAGES, noise(PAGES), PLAIN | {9: before})) == {AT: after}


def test_pages_of_a_mapping_may_be_in_many_runs():
    there = {number: data for number, data in noise(PAGES).items() if number % 100}
    assert advised(Mapping(AT, PAGES, there)) == {AT: 1 << 14}
    there = {number: data for number, data in there.items() if number % 10}
    assert advised(Mapping(AT, PAGES, there)) == {AT: 0}


def test_a_damaged_file_is_named():
    with pytest.raises(ImageError, match=r"mm-7\.img"):
        hugepages._with_advice(image(message({14: [b"\xff"]})), frozenset(), "mm-7.img")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", False),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_only_where_the_kernel_gives_them_to_nobody_else(tmp_path: Path, monkeypatch, text, wanted):
    switch = tmp_path / "enabled"
    if text is not None:
        switch.write_text(text + "\n")
    monkeypatch.setattr(hugepages, "_SWITCH", switch)
    assert hugepages.wanted() == wanted
