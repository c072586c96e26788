"""Which checkpoints of a job may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.model import new_checkpoint_id
from gpucr_hpc.store.retention import Candidate, removable, time_of

NOW, HOUR = 1_790_000_000.0, 3600.0
# Five, one an hour; the last one an hour ago.
AGES = [5, 4, 3, 2, 1]
IDS = [new_checkpoint_id(NOW - hours * HOUR) for hours in AGES]


def go(*, good: str = "ggggg", live: bool = True, **limits: float) -> list[int]:
    """Ages in hours of those that go."""
    found = [Candidate(i, mark == "g") for i, mark in zip(IDS, good, strict=True)]
    return [AGES[IDS.index(i)] for i in removable(found, live=live, now=NOW, **limits)]


def test_time_of_an_id():
    assert NOW - HOUR == time_of(new_checkpoint_id(NOW - HOUR))


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        ({}, []),
        ({"keep_last": 2}, [5, 4, 3]),
        ({"keep_last": 0}, [5, 4, 3, 2]),
        ({"keep_last": 9}, []),
        ({"keep_within_s": 2.5 * HOUR}, [5, 4, 3]),
        ({"keep_within_s": 0}, [5, 4, 3, 2]),
        ({"keep_last": 1, "keep_within_s": 2.5 * HOUR}, [5, 4, 3]),
        ({"keep_last": 4, "keep_within_s": 2.5 * HOUR}, [5]),
    ],
)
def test_limits_of_a_live_job(limits, gone):
    """What either limit wants to keep stays; the newest good one stays whatever they say."""
    assert gone == go(**limits)


def test_job_that_is_over_may_lose_all():
    assert [5, 4, 3, 2, 1] == go(live=False, keep_last=0)
    assert [5, 4, 3, 2] == go(live=False, keep_last=1)
    assert [] == go(live=False)


@pytest.mark.parametrize(
    ("good", "keep_last", "gone"),
    [
        ("ggggd", 1, [5, 4, 3]),  # the damaged newest one stays, and the good one before it
        ("ggddd", 1, [5]),
        ("gdgdd", 2, []),
        ("dddgg", 2, [5, 4, 3]),
        ("ddddd", 1, []),
        ("ddddd", 0, []),
        ("gdddd", 1, []),
    ],
)
def test_damaged_ones_count_for_nothing(good, keep_last, gone):
    assert gone == go(good=good, keep_last=keep_last)


@given(
    good=st.lists(st.booleans(), max_size=8),
    keep_last=st.none() | st.integers(0, 9),
    keep_within=st.none() | st.floats(0, 10 * HOUR),
)
def test_newest_good_one_of_a_live_job_never_goes(good, keep_last, keep_within):
    found = [Candidate(new_checkpoint_id(NOW - (len(good) - n) * HOUR), g) for n, g in enumerate(good)]
    gone = removable(found, live=True, now=NOW, keep_last=keep_last, keep_within_s=keep_within)
    left = [c for c in found if c.checkpoint not in gone]
    assert not any(good) or [c for c in found if c.good][-1] in left
    assert any(good) or not gone
    assert gone == [c.checkpoint for c in found][: len(gone)], "only the oldest go"
