"""What `scripts/measure_network` makes of its rounds."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.network import interval, read


@pytest.mark.parametrize("rounds", [20, 101, 200])
def test_interval_holds_the_true_median_as_often_as_it_says(rounds: int) -> None:
    """95 of 100, of a skewed distribution whose median is 1."""
    source = random.Random(rounds)
    held = 0
    for _ in range(2000):
        low, high = interval([source.lognormvariate(0, 0.5) for _ in range(rounds)])
        held += low <= 1 <= high
    assert 0.93 < held / 2000 < 0.98


def test_interval_lies_around_the_median() -> None:
    """Also for the fewest rounds that are measured."""
    for count in range(4, 40):
        values = [float(value) for value in range(count)]
        low, high = interval(values)
        assert low <= statistics.median(values) <= high
        assert low + high == count - 1


def test_rounds_are_read_without_the_first_ones(tmp_path: Path) -> None:
    output = tmp_path / "network-1.out"
    rounds = "".join(f"ROUND {n}e9 {n}e-10 {n}e-6\n" for n in range(1, 5))
    output.write_text(f"SEGMENT 1386\nCONTROL reno\n{rounds}END\n")
    assert read(output) == ([(3e9, 3e-10, 3e-6), (4e9, 4e-10, 4e-6)], "reno")


@pytest.mark.parametrize("text", ["ROUND 1 1 1\n", "gpucr: job 1 runs without protection\nROUND 1 1 1\nEND\n"])
def test_a_job_that_failed_or_was_not_protected_is_no_measurement(tmp_path: Path, text: str) -> None:
    output = tmp_path / "network-1.out"
    output.write_text(text)
    with pytest.raises(LabError):
        read(output)
