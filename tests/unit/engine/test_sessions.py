"""Which sessions CRIU can make again. Numbers: 2 the holder, 3 the shepherd, 10 the script."""

from __future__ import annotations

import os

import pytest

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.engine import sessions

BASE = {2: (1, 2), 3: (2, 3), 10: (3, 10), 11: (10, 10)}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {12: (10, 12), 13: (12, 12)},  # setsid, and a child in the new session
        {12: (10, 12), 13: (12, 10)},  # a child from before setsid
        {12: (2, 12), 13: (2, 10), 14: (2, 99), 15: (14, 99)},  # daemons: a leader; leader alive; leader gone
        {12: (10, 12), 13: (12, 10), 14: (13, 10), 15: (12, 10)},
        {12: (10, 12), 13: (12, 13), 14: (13, 10)},  # two levels left the session
        {12: (2, 99), 13: (12, 13), 14: (13, 99)},  # an orphan whose child left a session without leader
    ],
)
def test_sessions_that_come_back(more):
    assert [] == sessions.unrestorable(BASE | more, 2)


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({12: (10, 12), 13: (12, 99)}, [13]),  # the leader of its session is gone, its parent left
        ({12: (2, 12), 13: (12, 10)}, [13]),  # the leader lives elsewhere
        ({12: (10, 12), 13: (12, 13), 14: (13, 12), 15: (13, 10)}, [15]),  # 13 was born in one of two
    ],
)
def test_sessions_that_do_not(more, lost):
    """What criu/pstree.c calls "Can't find a session leader" and "Can't figure out which sid"."""
    assert lost == sessions.unrestorable(BASE | more, 2)


def test_parent_and_session_are_read():
    process = read_process(os.getpid())
    assert process is not None
    assert {os.getpid(): (os.getppid(), os.getsid(0))} == sessions.of([process])
