"""Large memory read beside CRIU, on real trees: image and restore are those of CRIU by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LOCKED_PAGES = 2 * 5 * 256  # in both processes


@pytest.fixture(scope="module")
def cases(run_trial: Callable[[str], dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What each dump and restore came to (capture_trial.py)."""
    return run_trial("capture_trial")


@pytest.mark.parametrize("way", ["image", "image, by descriptors"])
def test_image_is_that_of_criu_alone(cases: dict[str, dict[str, Any]], way: str) -> None:
    """The same pages; some differ, and a few are new, since the processes ran between the two dumps. CRIU marks locked
    memory as not to be restored lazily, which nobody does here; a mapping does not say that it is locked."""
    found = cases[way]
    assert found["missing"] == 0
    assert found["new"] < 50
    assert found["differ"] < found["pages"] // 200
    assert found["flags"] <= LOCKED_PAGES


@pytest.mark.parametrize("way", ["image", "image, by descriptors"])
def test_large_memory_went_beside_criu(cases: dict[str, dict[str, Any]], way: str) -> None:
    found = cases[way]
    assert found["named"] > found["plain"] // 2
    assert cases["by criu"]["named"] == 0


@pytest.mark.parametrize("way", ["beside", "beside, references", "beside, by descriptors", "early"])
def test_memory_is_the_same(cases: dict[str, dict[str, Any]], way: str) -> None:
    """Of every kind, in both processes; also of a job that went on, and of an image that refers to one of CRIU."""
    assert len(cases["before"]["sums"]) == 2
    found = {name: said | {"processors": []} for name, said in cases[way]["sums"].items()}
    assert found == {name: said | {"processors": []} for name, said in cases["before"]["sums"].items()}


def test_chunks_are_those_of_the_other_way(cases: dict[str, dict[str, Any]]) -> None:
    """An image of one way refers to memory in one of the other: little of it is stored again."""
    assert cases["references"]["stored"] < cases["references"]["plain"] // 10


def test_what_was_sealed_early_is_not_sealed_again(cases: dict[str, dict[str, Any]]) -> None:
    """Although the tree runs on and changes some of it."""
    found = cases["sealed early"]
    assert found["stored"] > 32 << 20
    assert found["then"] < cases["image"]["plain"] - found["stored"]


@pytest.mark.parametrize(
    ("case", "text"), [("unreadable", "cannot be read: Input/output error"), ("copier gone", "Broken pipe")]
)
def test_job_runs_on_when_memory_cannot_be_read(cases: dict[str, dict[str, Any]], case: str, text: str) -> None:
    """Also when gpucr-copier dies after all memory was sealed, which is then only to be compared."""
    found = cases[case]
    assert found["error"] == "MemoryUnreadable"
    assert text in found["text"]
    assert [said["own"] for said in found["sums"].values()] == [
        cases["before"]["sums"][name]["own"] for name in found["sums"]
    ]


def test_criu_alone_takes_what_could_not_be_read(cases: dict[str, dict[str, Any]]) -> None:
    """The next try, on the same node with the same trouble."""
    assert cases["again"]["named"] == 0
    assert abs(cases["again"]["plain"] - cases["image"]["plain"]) < cases["image"]["plain"] // 50
