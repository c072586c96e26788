"""The texts that make a lab node."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gpucr_hpc import config
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab import conf

GOLDEN = """\
ClusterName=lab
SlurmctldHost=ctl(10.77.0.10)
AuthType=auth/munge
CredType=cred/munge
SlurmUser=slurm
SlurmdUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=debug
SlurmdParameters=config_overrides
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1024
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptParameters=send_user_signal
JobRequeue=1
MaxBatchRequeue=1000
KillWait=20
MinJobAge=300
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=60
MailProg=/bin/true
MpiDefault=none
PlugStackConfig=/etc/slurm/plugstack.conf
NodeName=n1 NodeAddr=10.77.0.101 CPUs=2 RealMemory=8192 State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.102 CPUs=2 RealMemory=8192 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 State=UP MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off State=UP MaxTime=INFINITE
"""


def _render(*settings: str) -> str:
    return conf.SlurmConf(("n1", "n2"), memory_mb=8192, settings=conf.parse_settings(settings)).render()


def test_slurm_conf_golden() -> None:
    """The whole file, as slurmctld gets it."""
    assert _render() == GOLDEN


def test_setting_replaces_a_line_whatever_its_case() -> None:
    """slurm.conf does not look at the case of keys, so `--set killwait` must not add a second KillWait."""
    lines = _render("killwait=5").splitlines()
    assert [line for line in lines if line.lower().startswith("killwait")] == ["KillWait=5"]


def test_setting_adds_and_removes_lines() -> None:
    """An unknown key is a new line, an empty value takes a line away; a value may have `=` in it."""
    text = _render("TaskProlog=/shared/p.sh", "MaxBatchRequeue=", "SchedulerParameters=bf_interval=9")
    assert "TaskProlog=/shared/p.sh\n" in text
    assert "MaxBatchRequeue" not in text
    assert "SchedulerParameters=bf_interval=9\n" in text


def test_setting_of_partitions_and_nodes() -> None:
    """low., high. and node. name their lines; GraceTime alone is low's."""
    lines = _render("GraceTime=5", "high.MaxTime=10", "node.CPUs=4").splitlines()
    assert "GraceTime=5" in lines[-2].split()
    assert "MaxTime=10" in lines[-1].split()
    assert "CPUs=4" in lines[-3].split()


@pytest.mark.parametrize("word", ["KillWait", "=3", "medium.GraceTime=3"])
def test_bad_settings_are_refused(word: str) -> None:
    """A word that is no setting stops `up` before it touches anything."""
    with pytest.raises(LabError):
        _render(word)


@pytest.mark.parametrize("count", [0, 17])
def test_number_of_nodes_has_limits(count: int) -> None:
    """1 to 16 nodes."""
    with pytest.raises(LabError):
        conf.node_names(count)


def test_addresses_are_all_different() -> None:
    """Also with the largest number of nodes, none has the controller's or the bridge's address."""
    names = [conf.CONTROLLER, *conf.node_names(conf.MAX_NODES)]
    assert len(names) + 1 == len({conf.BRIDGE_ADDRESS, *map(conf.address, names)})


def test_gpucr_toml_is_valid() -> None:
    """The configuration of the nodes is one that the product accepts."""
    parsed = config.parse(tomllib.loads(conf.gpucr_toml()), Path("gpucr.toml"))
    assert (parsed.store.root, parsed.store.user) == (conf.STORE, conf.STORE_USER)


def test_example_configuration_has_every_key_with_its_default() -> None:
    """packaging/gpucr.toml.example, read as it is, gives the defaults, and it names each section and key."""
    path = Path(__file__).parents[2] / "packaging/gpucr.toml.example"
    table = tomllib.loads(path.read_text())
    default = config.Config()
    assert default == config.parse(table, path)
    for section, values in table.items():
        assert set(vars(getattr(default, section))) == set(values), section
    assert set(vars(default)) == set(table)


def test_plugstack_without_plugin_loads_nothing() -> None:
    """A plugstack.conf that names a missing plugin would be in every log."""
    assert conf.plugstack_conf(built=False).startswith("#")
    assert conf.plugstack_conf(built=True) == f"optional {conf.PLUGIN}\n"


def test_cgroup_conf_follows_the_host() -> None:
    """Version 2 without systemd needs settings that version 1 does not know."""
    assert "CgroupPlugin=cgroup/v1\n" in conf.cgroup_conf(1)
    assert "IgnoreSystemd" not in conf.cgroup_conf(1)
    assert "IgnoreSystemd=yes\n" in conf.cgroup_conf(2)
