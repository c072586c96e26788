"""Random programs under the interposer, cut at random moments, give the values of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.nccl import rig

# Thousands of programs in the long tests, about a hundred in every run.
FACTOR = 40 if os.environ.get("GPUCR_TEST_LONG") == "1" else 1


@pytest.mark.parametrize(
    ("kind", "ranks", "threads", "count"),
    [
        ("plain", 2, 1, 25),
        ("plain", 3, 1, 25),
        ("plain", 4, 1, 20),
        ("plain", 2, 2, 20),
        ("asan", 3, 1, 8),
        ("tsan", 2, 2, 8),
    ],
)
def test_cuts_change_no_value(kind: str, ranks: int, threads: int, count: int, tmp_path: Path) -> None:
    """Operations, groups, sends, splits, several communicators and threads: every cut is reached, torn down, made again."""

    async def both() -> tuple[rig.Outcome, rig.Outcome]:
        fields = {
            "ranks": ranks,
            "threads": threads,
            "count": count * FACTOR,
            "steps": 60,
            "first": 1000 * ranks + threads,
        }
        undisturbed = await rig.run(tmp_path / "undisturbed", **fields, limit_s=60.0 * FACTOR)
        cut = await rig.run(tmp_path / "cut", **fields, kind=kind, seed=ranks, limit_s=120.0 * FACTOR)
        return undisturbed, cut

    undisturbed, cut = asyncio.run(both())
    print(dict(cut.cuts), "slowest", max(cut.seconds, default=0.0))
    assert len(undisturbed.digests) == count * FACTOR * threads
    assert undisturbed.digests == cut.digests
    assert cut.errors == []
    assert cut.cuts["not reached"] == 0
    assert cut.cuts["whole"] >= 3


def test_a_lead_that_dies_while_ranks_are_made_again(tmp_path: Path) -> None:
    """Some ranks wait for the others in NCCL by then: the next agent brings those to them, with the same ids."""

    async def both() -> tuple[rig.Outcome, rig.Outcome]:
        fields = {"ranks": 4, "threads": 1, "count": 20 * FACTOR, "steps": 60, "first": 7000}
        undisturbed = await rig.run(tmp_path / "undisturbed", **fields, limit_s=60.0 * FACTOR)
        cut = await rig.run(tmp_path / "cut", **fields, kind="plain", half_rebuilt=1.0, limit_s=120.0 * FACTOR)
        return undisturbed, cut

    undisturbed, cut = asyncio.run(both())
    assert undisturbed.digests == cut.digests
    assert cut.errors == []
    assert cut.cuts["half rebuilt"] >= 3
