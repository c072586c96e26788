"""What a signal means, and how long a checkpoint may take."""

from __future__ import annotations

import json
import time

import pytest

from gpucr_hpc.agent.checkpointing import budget_s
from gpucr_hpc.agent.phase import Decision, decide
from gpucr_hpc.slurm.query import JobInfo, parse_job

OURS, TERM, USR1 = 50, 15, 10


def job(states: tuple[str, ...] = ("RUNNING",), *, preempt_time: int = 0, end_time: int = 0) -> JobInfo:
    record = {"job_id": 7, "job_state": states, "preempt_time": preempt_time, "end_time": end_time}
    return parse_job("7", json.dumps({"jobs": [record]}))


@pytest.mark.parametrize(
    ("info", "signal", "notice", "decision"),
    [
        (job(preempt_time=9), OURS, OURS, Decision.REQUEUE),
        (job(preempt_time=9), TERM, OURS, Decision.REQUEUE),
        (job(preempt_time=9), USR1, 0, Decision.REQUEUE),  # the user's own --signal stands for ours
        (job(("PENDING", "COMPLETING")), TERM, OURS, Decision.LEAVE),  # scontrol requeue
        (job(("PENDING", "COMPLETING"), preempt_time=9), TERM, OURS, Decision.LEAVE),
        (job(), OURS, OURS, Decision.IGNORE),  # the time limit comes near
        (job(), TERM, OURS, Decision.FORWARD),  # the time limit
        (job(), USR1, OURS, Decision.FORWARD),  # scancel --signal
        (job(), USR1, 0, Decision.FORWARD),
        (job(("CANCELLED", "COMPLETING")), TERM, OURS, Decision.FORWARD),  # scancel
        (job(("CANCELLED", "COMPLETING")), OURS, OURS, Decision.FORWARD),
    ],
)
def test_meaning_of_a_signal(info, signal, notice, decision):
    assert decision == decide(info, signal, notice)


def test_budget():
    """Never more than configured; in the grace time what is left of it; after a requeue part of KillWait."""
    now = int(time.time())
    assert 3600.0 == budget_s(None, True, 3600.0) == budget_s(job(preempt_time=9), False, 3600.0)
    assert 3600.0 == budget_s(job(), True, 3600.0)
    assert 98 < budget_s(job(preempt_time=now, end_time=now + 100), True, 3600.0) <= 100
    assert 30.0 == budget_s(job(preempt_time=now, end_time=now + 100), True, 30.0)
    assert 1.0 == budget_s(job(preempt_time=now, end_time=now - 5), True, 3600.0), "late is tried all the same"
    assert 20.0 == budget_s(job(("PENDING", "COMPLETING")), True, 3600.0)
    assert 5.0 == budget_s(job(("PENDING", "COMPLETING")), True, 5.0)
