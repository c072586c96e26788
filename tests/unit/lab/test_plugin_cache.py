"""The cache of built C parts, shared by the labs of all checkouts on a host."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpucr_hpc.lab import plugin


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where make was run; it installs one file."""
    runs: list[Path] = []

    def make(source: Path, _rootfs: Path, work: Path, _arguments: Sequence[str]) -> None:
        runs.append(source)
        installed = work / "out/usr/lib/gpucr"
        installed.mkdir(parents=True)
        (installed / "gpucr.so").write_text((source / "plugin.c").read_text())

    monkeypatch.setattr(plugin, "make", make)
    return runs


def checkout(at: Path, text: str) -> Path:
    at.mkdir(parents=True)
    (at / "Makefile").touch()
    (at / "plugin.c").write_text(text)
    return at


def test_builds_of_checkouts_live_side_by_side(tmp_path: Path, built: list[Path]) -> None:
    one, two = checkout(tmp_path / "a", "one"), checkout(tmp_path / "b", "two")
    half_done = tmp_path / "plugin" / "building.1"
    half_done.mkdir(parents=True)
    for _ in range(2):
        found = [plugin.build(source, tmp_path / "root", tmp_path) for source in (one, two)]
        assert ["one", "two"] == [(path / "gpucr.so").read_text() for path in found if path]
    assert [one, two] == built
    assert half_done.exists()


def test_what_nobody_wanted_for_days_goes(tmp_path: Path, built: list[Path]) -> None:
    one, two = checkout(tmp_path / "a", "one"), checkout(tmp_path / "b", "two")
    first, wanted = (plugin.build(source, tmp_path / "root", tmp_path) for source in (one, two))
    assert first
    assert wanted
    for path in (first, wanted):
        os.utime(path, (0, time.time() - 3 * 86400))
    plugin.build(two, tmp_path / "root", tmp_path)  # wanted again
    plugin.build(checkout(tmp_path / "c", "three"), tmp_path / "root", tmp_path)
    assert (first.exists(), wanted.exists()) == (False, True)


def test_builds_at_the_same_time(tmp_path: Path, built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes of one number, as those of two boxes are: neither takes away what the other is making."""
    one, two = checkout(tmp_path / "a", "one"), checkout(tmp_path / "b", "two")
    alone = plugin.make

    def make(source: Path, rootfs: Path, work: Path, arguments: Sequence[str]) -> None:
        if source == one:
            (work / "half done").touch()
            plugin.build(two, tmp_path / "root", tmp_path)
            assert (work / "half done").exists()
        alone(source, rootfs, work, arguments)

    monkeypatch.setattr(plugin, "make", make)
    found = [plugin.build(source, tmp_path / "root", tmp_path) for source in (one, two)]
    assert ["one", "two"] == [(path / "gpucr.so").read_text() for path in found if path]
    assert [two, one] == built
