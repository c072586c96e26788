"""What is in a node that should not be there when no job runs: tests ask after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpucr_hpc.lab import host
from gpucr_hpc.lab.conf import CONTROLLER, HOMES

if TYPE_CHECKING:
    from gpucr_hpc.lab.cluster import Lab

_LINKS = {"lo", "eth0"}
_SLURMCTLD_CHILD = "slurmscriptd"


def leftovers_of(lab: Lab, node: str) -> list[str]:
    """Stray processes, stopped or frozen tasks, mounts below /run/gpucr, network namespaces and links besides
    the node's own, nft tables, run directories, link_remap.* files of CRIU; one line each, with the node's name.
    """
    pid = lab.pid(node)
    if pid is None:
        return []
    found = [*_processes(lab, node, pid), *_mounts(pid), *_frozen(node), *_files(lab, node)]
    if node != CONTROLLER:
        found += _network(lab, node)
    return [f"{node}: {line}" for line in found]


def _processes(lab: Lab, node: str, pid: int) -> Iterator[str]:
    tasks = host.tasks_of(pid)
    own = {_host_pid(task.pid): task for task in tasks}
    daemons = {own[inner].pid for inner in lab.daemons(node).values() if inner in own}
    own_network = _namespace(pid, "net")
    for task in tasks:
        if task.state in "Tt":
            yield f"stopped: {task}"
        child = task.parent in daemons and task.name == _SLURMCTLD_CHILD
        if task.pid != pid and task.pid not in daemons and not child:
            yield f"stray process: {task}"
        network = _namespace(task.pid, "net")
        if network and network != own_network:
            yield f"network namespace {network} of {task}"


def _host_pid(pid: int) -> int:
    """The pid that the node itself gives to a process of the host's number `pid` (NSpid, second number)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                numbers = line.split()[1:]
                return int(numbers[1]) if len(numbers) > 1 else -1
    except (OSError, ValueError):
        pass
    return -1


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _mounts(pid: int) -> Iterator[str]:
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        target, kind = fields[4], fields[fields.index("-") + 1]
        if target == "/run/gpucr" or target.startswith("/run/gpucr/"):
            yield f"mount on {target} ({kind})"
        elif kind == "nsfs":
            yield f"namespace kept by a mount on {target}"


def _frozen(node: str) -> Iterator[str]:
    for path in host.frozen_cgroups(node):
        yield f"frozen cgroup {path}"


def _files(lab: Lab, node: str) -> Iterator[str]:
    tops = ["/dev/shm", "/tmp", "/run"]  # noqa: S108
    if node == CONTROLLER:
        tops.append(HOMES)  # shared: one look is enough
    root = lab.root(node)
    for job in (root / "run/gpucr/jobs").glob("*"):
        yield f"run directory of job {job.name}"
    for top in tops:
        for directory, _, names in os.walk(f"{root}{top}"):
            for name in names:
                if name.startswith("link_remap."):
                    yield f"CRIU's link file {directory.removeprefix(str(root))}/{name}"


def _network(lab: Lab, node: str) -> Iterator[str]:
    script = "nft list tables; ls /sys/class/net | sed 's/^/link /'"
    for line in lab.exec(node, ["sh", "-c", script], check=False).stdout.splitlines():
        if line.startswith("table"):
            yield f"nft {line}"
        elif line.startswith("link ") and line[5:] not in _LINKS:
            yield line
