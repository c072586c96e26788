"""The texts that make a node: addresses, slurm.conf, cgroup.conf, plugstack.conf, hosts, gpucr.toml. Pure.

Slurm settings follow the project's notes on Slurm: preemption by partition, requeue, send_user_signal
(without it the B: signal is not sent on preemption), proctrack/cgroup, short scheduling intervals and
requeue_delay (26.05) for speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpucr_hpc.errors import LabError

CONTROLLER = "ctl"
BRIDGE_ADDRESS = "10.77.0.254"
PREFIX_LENGTH = 24
MAX_NODES = 16
HOMES = "/shared/home"
STORE = "/shared/gpucr"
STORE_USER = "gpucr"
PLUGIN = "/usr/lib/gpucr/gpucr.so"


def node_names(count: int) -> list[str]:
    """The compute nodes of a lab of that size: n1 to nN; LabError beyond 1..MAX_NODES."""
    if not 1 <= count <= MAX_NODES:
        raise LabError(reason=f"{count} nodes: choose 1 to {MAX_NODES}")
    return [f"n{index}" for index in range(1, count + 1)]


def address(node: str) -> str:
    """Address of a node: ctl has .10, nK has .(100+K)."""
    return "10.77.0.10" if node == CONTROLLER else f"10.77.0.{100 + int(node[1:])}"


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words of --set as a table; LabError for a word without a key."""
    table: dict[str, str] = {}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise LabError(reason=f"--set {word}: write KEY=VALUE, low.KEY=VALUE, high.KEY=VALUE or node.KEY=VALUE")
        table[key] = value
    return table


@dataclass(frozen=True)
class SlurmConf:
    """What slurm.conf depends on.

    cpus, memory_mb: of every node, whatever the host has (config_overrides). settings: the words of --set. A
    key with the prefix `low.`, `high.` or `node.` goes to that partition's or the nodes' line; GraceTime
    alone means low's. Any other key replaces the global line of that name or adds one; an empty value removes
    it.
    """

    nodes: tuple[str, ...]
    cpus: int = 2
    memory_mb: int = 2048
    settings: Mapping[str, str] | None = None

    def render(self) -> str:
        tables: dict[str, dict[str, str]] = {
            "": self._global(),
            "node": {"CPUs": str(self.cpus), "RealMemory": str(self.memory_mb), "State": "UNKNOWN"},
            "low": {
                "Nodes": "ALL", "Default": "YES", "PriorityTier": "1", "PreemptMode": "REQUEUE",
                "GraceTime": "60", "State": "UP", "MaxTime": "INFINITE",
            },
            "high": {
                "Nodes": "ALL", "PriorityTier": "10", "PreemptMode": "off", "State": "UP",
                "MaxTime": "INFINITE",
            },
        }  # fmt: skip
        for key, value in (self.settings or {}).items():
            where, dot, name = key.partition(".")
            if not dot:
                where, name = ("low", key) if key.lower() == "gracetime" else ("", key)
            if where not in tables:
                raise LabError(reason=f"--set {key}: no line {where!r}, only low, high and node")
            _put(tables[where], name, value)
        lines = [f"{key}={value}" for key, value in tables[""].items()]
        node = " ".join(f"{key}={value}" for key, value in tables["node"].items())
        lines += [f"NodeName={name} NodeAddr={address(name)} {node}" for name in self.nodes]
        for name in ("low", "high"):
            lines.append(" ".join([f"PartitionName={name}", *(f"{k}={v}" for k, v in tables[name].items())]))
        return "\n".join(lines) + "\n"

    def _global(self) -> dict[str, str]:
        return {
            "ClusterName": "lab",
            "SlurmctldHost": f"{CONTROLLER}({address(CONTROLLER)})",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "SlurmUser": "slurm",
            "SlurmdUser": "root",
            "StateSaveLocation": "/var/spool/slurmctld",
            "SlurmdSpoolDir": "/var/spool/slurmd",
            "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
            "SlurmdPidFile": "/run/slurm/slurmd.pid",
            "SlurmctldLogFile": "/var/log/slurmctld.log",
            "SlurmdLogFile": "/var/log/slurmd.log",
            "SlurmctldDebug": "verbose",
            "SlurmdDebug": "debug",
            "SlurmdParameters": "config_overrides",
            "ProctrackType": "proctrack/cgroup",
            "TaskPlugin": "task/cgroup,task/affinity",
            "SelectType": "select/cons_tres",
            # Without memory as a resource task/cgroup leaves the memory cgroup out, whatever
            # ConstrainRAMSpace says [seen].
            "SelectTypeParameters": "CR_Core_Memory",
            "DefMemPerCPU": str(self.memory_mb // self.cpus // 4),
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=2,sched_interval=2,requeue_delay=1",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "PreemptParameters": "send_user_signal",
            "JobRequeue": "1",
            "MaxBatchRequeue": "1000",
            "KillWait": "20",
            "MinJobAge": "300",
            "ReturnToService": "2",
            "SlurmdTimeout": "10",
            "SlurmctldTimeout": "60",
            "MailProg": "/bin/true",
            "MpiDefault": "none",
            "PlugStackConfig": "/etc/slurm/plugstack.conf",
        }


def _put(table: dict[str, str], key: str, value: str) -> None:
    """Set a key the way slurm.conf reads it: case does not count; an empty value removes the key."""
    old = next((name for name in table if name.lower() == key.lower()), key)
    if value:
        table[old] = value
    else:
        table.pop(old, None)


def cgroup_conf(version: int) -> str:
    """cgroup.conf for the host's cgroup version.

    Version 1 and hybrid hosts: by every test. Version 2: seen with scripts/gpu_slurm, else written from
    Slurm's manual; without systemd slurmd makes its scope itself (IgnoreSystemd), and in a cgroup namespace
    it must enable the controllers itself (EnableControllers).
    """
    lines = [f"CgroupPlugin=cgroup/v{version}", "ConstrainCores=no", "ConstrainRAMSpace=yes"]
    if version == 2:
        lines += ["IgnoreSystemd=yes", "EnableControllers=yes"]
    return "\n".join(lines) + "\n"


def plugstack_conf(built: bool) -> str:
    """plugstack.conf: the plugin when there is one, else nothing."""
    return f"optional {PLUGIN}\n" if built else "# the SPANK plugin was not built\n"


def hosts(nodes: Sequence[str]) -> str:
    """/etc/hosts of every node."""
    lines = ["127.0.0.1 localhost", *(f"{address(name)} {name}" for name in (CONTROLLER, *nodes))]
    return "\n".join(lines) + "\n"


def gpucr_toml() -> str:
    """/etc/gpucr/gpucr.toml of every node."""
    store = f'[store]\nroot = "{STORE}"\nuser = "{STORE_USER}"\nallowed_roots = ["{HOMES}"]\n'
    return f'{store}\n[agent]\noperators = []\ncheckpoint_interval_min = "1s"\n'
