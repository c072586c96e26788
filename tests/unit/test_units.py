"""Durations and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.errors import UsageError
from gpucr_hpc.units import format_bytes, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("2d", 172800),
        ("1h30m", 5400),
        (" 250ms ", 0.25),
        ("1.5m", 90),
    ],
)
def test_durations(text, seconds):
    assert seconds == parse_duration(text)


@pytest.mark.parametrize("text", ["", " ", "x", "5 m", "5x", "-3s", "1h,3m", "s", "1:30:00"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(hours, minutes, seconds):
    assert hours * 3600 + minutes * 60 + seconds == parse_duration(f"{hours}h{minutes}m{seconds}s")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (1536, "1.5 KiB"), (5 << 60, "5.12e+03 PiB")]
)
def test_sizes(size, text):
    assert text == format_bytes(size)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.264, "0.26 s"),
        (41.2, "41 s"),
        (59.7, "1 min 0 s"),
        (303, "5 min 3 s"),
        (7800, "2 h 10 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_for_people(seconds, text):
    assert text == format_duration(seconds)
