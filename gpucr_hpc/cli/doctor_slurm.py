"""Slurm's live configuration against what protected jobs need. Pure: it judges what `scontrol show` said.

Each finding says what a wrong value costs and the line that mends it; reasons are in docs/admin.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpucr_hpc.units import format_bytes, format_duration

#: Time of a checkpoint besides its dump (question to slurmctld, start of worker and CRIU), in seconds.
FIXED_S = 1.0
#: What is added for a store that is busy with others.
RESERVE = 1.5


@dataclass(frozen=True)
class Finding:
    """what: area; good; detail: what was found; advice: line to add and its reason, shown when it is not good."""

    what: str
    good: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """key: of slurm.conf in lower case; test of its value; cost of a wrong one; line to add."""

    key: str
    test: Callable[[str], bool]
    cost: str
    line: str


def _seconds(value: str) -> int:
    found = re.match(r"\d+", value)
    return int(found[0]) if found else 0


RULES = (
    Rule(
        "proctracktype",
        lambda v: v == "proctrack/cgroup",
        "Slurm would signal every process of a job itself, and could not end a capsule",
        "ProctrackType=proctrack/cgroup",
    ),
    Rule(
        "preempttype",
        lambda v: v in ("preempt/partition_prio", "preempt/qos"),
        "no job is ever preempted",
        "PreemptType=preempt/partition_prio",
    ),
    Rule(
        "preemptmode",
        lambda v: "REQUEUE" in v.upper(),
        "preempted jobs are cancelled or suspended, not moved",
        "PreemptMode=REQUEUE",
    ),
    Rule(
        "preemptparameters",
        lambda v: "send_user_signal" in v,
        "a preempted job learns of it only when its processes are killed",
        "PreemptParameters=send_user_signal",
    ),
    Rule("jobrequeue", lambda v: v == "1", "jobs are not requeued unless they ask for it", "JobRequeue=1"),
    Rule(
        "maxbatchrequeue",
        lambda v: v.isdigit() and int(v) >= 100,
        "a job that is moved often is held after this many requeues",
        "MaxBatchRequeue=1000",
    ),
    Rule(
        "schedulerparameters",
        lambda v: "requeue_delay" in v,
        "a requeued job waits up to two minutes before it may start (Slurm 25.11 and newer)",
        "SchedulerParameters=requeue_delay=1",
    ),
    Rule(
        "selecttypeparameters",
        lambda v: "MEMORY" in v.upper(),
        "memory is no resource: Slurm does not limit it, and lets a job come back on a node without room for it",
        "SelectTypeParameters=CR_Core_Memory",
    ),
    Rule(
        "killwait",
        lambda v: _seconds(v) >= 20,
        "after `scontrol requeue` or the loss of a node too little time is left for a checkpoint",
        "KillWait=60",
    ),
    Rule(
        "slurmdtimeout",
        lambda v: 0 < _seconds(v) <= 600,
        "a job of a node that died is not requeued, or only after this time",
        "SlurmdTimeout=300",
    ),
    Rule(
        "taskplugin",
        lambda v: "task/cgroup" in v,
        "a job's memory and processors are not limited, also not those of a restored one",
        "TaskPlugin=task/cgroup,task/affinity",
    ),
    Rule(
        "returntoservice",
        lambda v: v in ("1", "2"),
        "a node that was lost and has come back stays out of service until somebody says so",
        "ReturnToService=1",
    ),
)


def judge(live: Mapping[str, str]) -> list[Finding]:
    """Findings about slurm.conf; live: keys in lower case."""
    found = []
    for rule in RULES:
        value = live.get(rule.key, "(not set)")
        good = bool(rule.test(value))
        found.append(Finding("Slurm", good, f"{rule.key}={value}", f"{rule.line}   # otherwise {rule.cost}"))
    for key in ("jobcontainertype", "namespacetype"):
        value = live.get(key, "")
        if value and value not in ("(null)", "none", "job_container/none"):
            advice = f"no {key}   # a capsule has namespaces of its own; with Slurm's around it nothing was tried"
            found.append(Finding("Slurm", False, f"{key}={value}", advice))
    return found


def grace_s(memory_bytes: float, bytes_per_s: float) -> float:
    """Grace time that a job with so much memory in use on a node needs, in seconds; bytes_per_s: how fast one node's
    memory goes to stable storage."""
    return RESERVE * (FIXED_S + memory_bytes / bytes_per_s)


def judge_partitions(
    partitions: Sequence[Mapping[str, str]], bytes_per_s: float, node_memory_bytes: float
) -> list[Finding]:
    """Whether preemptable partitions give time for a checkpoint. partitions: keys in lower case."""
    found = []
    for partition in partitions:
        if "REQUEUE" not in partition.get("preemptmode", "").upper():
            continue
        name, grace = partition.get("partitionname", "?"), _seconds(partition.get("gracetime", "0"))
        needed = grace_s(node_memory_bytes, bytes_per_s)
        covers = max(0.0, (grace / RESERVE - FIXED_S) * bytes_per_s)
        detail = (
            f"partition {name}: GraceTime={grace} is enough for {format_bytes(int(covers))} in use on a node at "
            f"{format_bytes(int(bytes_per_s))}/s"
        )
        advice = (
            f"PartitionName={name} ... GraceTime={max(30, round(needed))}   # {RESERVE} * ({FIXED_S:.0f} s + memory / "
            f"speed), for a job that uses all {format_bytes(int(node_memory_bytes))} of a node "
            f"({format_duration(needed)}); a larger job goes on from an older checkpoint"
        )
        found.append(Finding("Slurm", covers >= node_memory_bytes / 2, detail, advice))
    return found
