"""The report of scripts/measure_image."""

from __future__ import annotations

import pytest

from gpucr_hpc.lab import measure_image


def test_ratios_of_what_was_measured_only():
    """Ours over theirs; nothing where one of the two is missing or took no time."""
    runs = {
        "gpucr": {"durable_s": 2.0, "freeze_s": 1.0, "stored_bytes": 100, "restore_s": 3.0},
        "gpucr, unchanged": {"durable_s": 0.5, "stored_bytes": 1},
        "criu to disk": {"durable_s": 4.0, "stored_bytes": 200},
        "criu to tmpfs": {"freeze_s": 0.0, "restore_s": 2.0},
    }
    found = measure_image.ratios(runs | {"gpucr, runs on": {"freeze_s": 0.2}})
    assert 0.5 == found["durable / criu to disk"]
    assert 1.5 == found["restore / criu from tmpfs"]
    assert 0.25 == found["unchanged: durable / full"]
    assert 0.01 == found["unchanged: stored / full"]
    assert found["durable / criu, tar, lz4, openssl"] is found["freeze / criu to tmpfs"] is None


def test_numbers_of_threads(capsys):
    assert [4, 16] == measure_image.counts("4,16")
    for bad in ("", "4,x", "0"):
        with pytest.raises(ValueError, match=r".+"):
            measure_image.counts(bad)
    rates = {"memcpy": [1.0, 2.5]}
    measure_image.show_primitives({"threads": [1, 4], "rates": rates, "ratios": {}})
    assert [["threads", "1", "4"], ["memcpy", "1.00", "2.50"]] == [
        line.split() for line in capsys.readouterr().out.splitlines()[2:]
    ]


def test_table(capsys):
    """A tree's table has a line for each way, and a dash for what was not measured."""
    run = {"freeze_s": 1.0, "durable_s": 2.0, "cpu_s": 0.0, "peak_bytes": 0, "stored_bytes": 1 << 20, "restore_s": 0.0}
    measure_image.show({"tree": "mixed", "size_bytes": 1 << 30, "runs": {"gpucr": run}, "ratios": {"a / b": None}})
    said = capsys.readouterr().out
    assert "mixed tree, 1 GiB" in said
    row = next(line for line in said.splitlines() if "gpucr" in line)
    assert ["gpucr", "1.00", "s", "2.00", "s", "-", "-", "1", "MiB", "-"] == row.split()
    assert "a / b" in said
