"""Quotas as quotactl_fd(2) answers; the real call on a file system without quotas, the arithmetic on answers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from gpucr_hpc.store import posix, quota

MIB = 1 << 20


class Kernel:
    """Answers by kind of quota: 0 user, 1 group; (hard, soft) in KiB and space in bytes."""

    def __init__(self, **kinds: tuple[int, int, int]) -> None:
        self.kinds = {"user": 0, "group": 1}
        self.answers = {self.kinds[name]: answer for name, answer in kinds.items()}

    def syscall(self, number, _fd, command, owner, room):
        assert (443, 0x800007) == (number, command.value >> 8)
        kind = command.value & 0xFF
        assert owner.value == (os.geteuid(), os.getegid())[kind]
        if kind not in self.answers:
            return -1
        hard, soft, space = self.answers[kind]
        room.raw = quota._DQBLK.pack(hard, soft, space, 0, 0, 0, 0, 0, 7)
        return 0


def test_no_quota(tmp_path):
    """A file system without quotas, or a directory that is not there: nothing is known."""
    assert quota.left_bytes(str(tmp_path)) is None
    assert quota.left_bytes(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ({"user": (2048, 0, MIB)}, MIB),
        ({"user": (2048, 1536, MIB)}, MIB // 2),
        ({"user": (2048, 0, 3 * MIB)}, 0),
        ({"user": (0, 0, MIB)}, None),
        ({"user": (4096, 0, 0), "group": (1024, 0, 0)}, MIB),
        ({"group": (0, 1024, 0)}, MIB),
        ({}, None),
    ],
)
def test_limits(tmp_path, monkeypatch, answers, left):
    """The smallest of user's and group's, hard and soft; over it is nothing left, without it no limit."""
    monkeypatch.setattr(quota, "_libc", Kernel(**answers))
    assert left == quota.left_bytes(str(tmp_path))


def test_store_counts_it(tmp_path, monkeypatch):
    """Space is what file system and quota both allow."""
    monkeypatch.setattr(posix, "left_bytes", lambda _: 5)
    assert 5 == posix.PosixStore(tmp_path).free_bytes()
    monkeypatch.setattr(posix, "left_bytes", lambda _: None)
    monkeypatch.setattr(posix.os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=10))
    assert 30 == posix.PosixStore(tmp_path).free_bytes()
