"""Memory filled beside CRIU, on real trees: the same memory, no more of it, and no tree that runs half filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_SLACK_BYTES = 2 << 20


@pytest.fixture(scope="module")
def cases(run_trial: Callable[[str], dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What each restore of one dump came to (fill_trial.py)."""
    return run_trial("fill_trial")


@pytest.mark.parametrize("way", ["criu", "fill", "fill, huge pages", "fill, references"])
def test_memory_is_the_same(cases: dict[str, dict[str, Any]], way: str) -> None:
    """Of every kind, in both processes; threads know their processor, which the kernel writes into memory, too."""
    found = cases[way]
    assert found["sums"] == cases["before"]["sums"]
    assert len(found["sums"]) == 2
    assert all(said["processors"] == [True] * 3 for said in found["sums"].values())
    assert (found["to_fill"] == 2) == (found["fill_s"] > 0) == (way != "criu")


def test_tree_has_no_more_memory_and_the_same_mappings(cases: dict[str, dict[str, Any]]) -> None:
    """What parent and child shared they share again; zeros take no memory; huge pages are huge again."""
    criu, fill = cases["criu"]["memory"], cases["fill"]["memory"]
    assert cases["fill"]["mappings"] == cases["criu"]["mappings"]
    assert fill["Locked"] == criu["Locked"] > 0
    assert fill["AnonHugePages"] >= 32 << 20
    for name in ("Rss", "Pss", "Private_Dirty"):
        assert fill[name] <= criu[name] + _SLACK_BYTES, name


def test_full_mappings_ask_for_huge_pages_where_that_is_wanted(cases: dict[str, dict[str, Any]]) -> None:
    """And nothing else of any mapping is another."""
    asked = cases["fill, huge pages"]
    flags = [_bytes_by_flags(cases[way]["mappings"]) for way in ("fill", "fill, huge pages")]
    without = [{kind - {"hg"}: 0 for kind in found} for found in flags]
    for kinds, found in zip(without, flags, strict=True):
        for kind, size in found.items():
            kinds[kind - {"hg"}] += size
    assert without[0] == without[1]
    full, huge = (sum(size for kind, size in found.items() if "hg" in kind) for found in flags)
    assert huge >= full + (64 << 20)
    assert asked["memory"]["AnonHugePages"] >= cases["fill"]["memory"]["AnonHugePages"] + (32 << 20)


def _bytes_by_flags(mappings: list[list[str]]) -> dict[frozenset[str], int]:
    """Neighbours with the same flags are one mapping or several."""
    found: dict[frozenset[str], int] = {}
    for head, *flags in mappings:
        place, permissions = head.split()
        first, last = (int(address, 16) for address in place.split("-"))
        kind = frozenset([permissions, *flags])
        found[kind] = found.get(kind, 0) + last - first
    return found


@pytest.mark.parametrize(
    ("trouble", "error", "text"),
    [
        ("worker_killed", "HostError", "the store worker died during"),
        ("task_killed", "RestoreFailed", "cannot be filled"),
        ("task_killed_late", "RestoreFailed", "died while its memory was filled"),
        ("copier_killed", "RestoreFailed", "cannot be filled: Broken pipe"),
        ("given_up", "CancelledError", ""),
        ("damaged", "IntegrityError", "is not what was written"),
    ],
)
def test_nothing_runs_half_filled(cases: dict[str, dict[str, Any]], trouble: str, error: str, text: str) -> None:
    """The restore fails with the cause, no process of the tree has run, none is left."""
    found = cases[trouble]
    assert found["to_fill"] == 2
    assert (error, False, []) == (found["error"], found["ran"], found["left"])
    assert text in found["text"]
