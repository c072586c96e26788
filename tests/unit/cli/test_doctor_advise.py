"""What doctor says of Slurm's configuration, and what `gpucr advise` computes."""

from __future__ import annotations

import math

import pytest

from gpucr_hpc.cli import doctor_slurm
from gpucr_hpc.cli.cmd_advise import daly_interval_s, loss

GOOD = {
    "proctracktype": "proctrack/cgroup", "preempttype": "preempt/partition_prio", "preemptmode": "REQUEUE",
    "preemptparameters": "send_user_signal", "jobrequeue": "1", "maxbatchrequeue": "1000",
    "schedulerparameters": "bf_interval=2,requeue_delay=1", "selecttypeparameters": "CR_CORE_MEMORY",
    "killwait": "30 sec", "slurmdtimeout": "300 sec", "taskplugin": "task/cgroup,task/affinity", "returntoservice": "2",
}  # fmt: skip


def bad(live: dict[str, str]) -> list[str]:
    return [f.detail for f in doctor_slurm.judge(live) if not f.good]


def test_a_good_configuration():
    assert [] == bad(GOOD)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("proctracktype", "proctrack/linuxproc"), ("preemptmode", "OFF"), ("preemptparameters", "(null)"),
        ("jobrequeue", "0"), ("maxbatchrequeue", "5"), ("schedulerparameters", "(null)"), ("killwait", "5 sec"),
        ("selecttypeparameters", "CR_CORE"), ("slurmdtimeout", "0 sec"), ("taskplugin", "task/affinity"),
        ("jobcontainertype", "job_container/tmpfs"), ("returntoservice", "0"), ("preempttype", "(null)"),
    ],
)  # fmt: skip
def test_each_wrong_value_is_named(key, value):
    """With what it costs and the line to add."""
    (finding,) = (f for f in doctor_slurm.judge(GOOD | {key: value}) if not f.good)
    assert f"{key}={value}" == finding.detail
    assert "   # " in finding.advice


def test_a_missing_key_is_a_finding():
    assert ["proctracktype=(not set)"] == bad({k: v for k, v in GOOD.items() if k != "proctracktype"})


def test_grace_time():
    """1.5 times a fixed second and the time of the memory; partitions without requeue are not looked at."""
    assert 1.5 * (1 + 10) == doctor_slurm.grace_s(10e9, 1e9)
    low = {"partitionname": "low", "preemptmode": "REQUEUE", "gracetime": "60"}
    high = {"partitionname": "high", "preemptmode": "OFF", "gracetime": "0"}
    (good,) = doctor_slurm.judge_partitions([low, high], 1e9, 64e9)
    assert good.good
    assert "36.3 GiB" in good.detail
    (short,) = doctor_slurm.judge_partitions([low | {"gracetime": "0"}], 1e9, 64e9)
    assert not short.good
    assert "PartitionName=low ... GraceTime=98 " in short.advice


def test_interval_by_young_and_daly():
    """Close to Young's for a cheap checkpoint, and better than any other by the loss that it is to lessen."""
    cost, mtbf = 10.0, 86400.0
    best = daly_interval_s(cost, mtbf)
    assert math.isclose(best, math.sqrt(2 * cost * mtbf), rel_tol=0.02)
    lost = loss(best, cost, mtbf, 30)
    assert all(lost <= loss(best * factor, cost, mtbf, 30) for factor in (0.5, 0.8, 1.25, 2))
    assert mtbf == daly_interval_s(3 * mtbf, mtbf)
