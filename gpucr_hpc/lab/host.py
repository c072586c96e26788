"""What the lab reads and changes on the host: processes of a node, links, cgroups."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.boot import V2_PARENT, start_time
from gpucr_hpc.lab.conf import BRIDGE_ADDRESS, PREFIX_LENGTH

BRIDGE = "br-gpucr"
LINK_PREFIX = "gpucr-"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Task:
    """A process as the host sees it. state: one letter, as in ps(1)."""

    pid: int
    parent: int
    state: str
    name: str
    pid_namespace: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} of the host, state {self.state}, parent {self.parent})"


def all_tasks() -> dict[int, Task]:
    """Every process of the host; those that end while we look are left out."""
    tasks: dict[int, Task] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            namespace = os.readlink(f"/proc/{entry}/ns/pid")
        except FileNotFoundError:
            namespace = ""  # a zombie has none
        except (ProcessLookupError, PermissionError):
            continue
        else:
            text = text or ""
        match = re.match(r"(\d+) \((.*)\) (\S) (\d+)", text, re.DOTALL)
        if match:
            pid = int(match[1])
            tasks[pid] = Task(pid, int(match[4]), match[3], match[2], namespace)
    return tasks


def tasks_of(root: int, tasks: dict[int, Task] | None = None) -> list[Task]:
    """All processes of the node whose PID 1 is `root`, that one included.

    Descendants of PID 1, and those that were put into the node's PID namespace from outside (nsenter), whose
    parent is outside, with their descendants. Nested PID namespaces are covered, since their init has a
    parent in the node.
    """
    known = all_tasks() if tasks is None else tasks
    if root not in known:
        return []
    namespace = known[root].pid_namespace
    chosen = {pid for pid, task in known.items() if pid == root or (namespace and task.pid_namespace == namespace)}
    children: dict[int, list[int]] = {}
    for task in known.values():
        children.setdefault(task.parent, []).append(task.pid)
    todo = list(chosen)
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in chosen:
                chosen.add(child)
                todo.append(child)
    return [known[pid] for pid in sorted(chosen)]


def read_pid(path: Path) -> int | None:
    """The process that a pid file of `boot` names, or None when it has ended (a reused pid has another start
    time).
    """
    try:
        pid, started = (int(word) for word in path.read_text().split())
        return pid if start_time(pid) == started and not _is_zombie(pid) else None
    except (OSError, ValueError):
        return None


def _is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text(errors="replace")


def kill_if_there(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; a process that has ended is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def cgroup_version() -> int:
    """1 for version 1 and hybrid hosts, 2 for a host with version 2 alone."""
    return 2 if (CGROUPS / "cgroup.controllers").exists() else 1


def cgroups_of(node: str) -> list[Path]:
    """The cgroup directories that slurmd made for a node, one per hierarchy (version 1), or the node's own
    (2).
    """
    if cgroup_version() == 2:
        return [path for path in [CGROUPS / V2_PARENT / node] if path.is_dir()]
    return sorted(CGROUPS.glob(f"*/slurm_{node}"))


def below(path: Path) -> Iterator[Path]:
    for directory, names, _ in os.walk(path, topdown=False):
        yield from (Path(directory, name) for name in names)
    yield path


def thaw(node: str) -> None:
    """Let the node's frozen tasks go."""
    for top in cgroups_of(node):
        thaw_below(top)


def thaw_below(top: Path) -> None:
    """Let the frozen tasks of a cgroup go: on version 1 a frozen task does not even die of SIGKILL."""
    for path in below(top):
        state = path / "freezer.state"
        if state.exists():
            try:
                state.write_text("THAWED")
            except OSError as error:
                if path.exists():
                    raise LabError(reason=f"{path}: cannot thaw: {error.strerror}") from error


def frozen_cgroups(node: str) -> list[Path]:
    """Freezer cgroups (version 1) of the node that are not thawed."""
    found = []
    for top in cgroups_of(node):
        for path in below(top):
            try:
                if (path / "freezer.state").read_text().strip() not in ("THAWED", ""):
                    found.append(path)
            except OSError:
                continue
    return found


def remove_cgroups(node: str) -> bool:
    """Remove a dead node's cgroup directories; False while one is still busy (its tasks are dying)."""
    for top in cgroups_of(node):
        for path in below(top):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
    return True


def remove_cgroup_parent() -> None:
    """Remove the lab's own directory above the nodes' (version 2)."""
    parent = CGROUPS / V2_PARENT
    if cgroup_version() == 2 and parent.is_dir():
        parent.rmdir()


def link_of(node: str) -> str:
    """The host's end of a node's cable."""
    return f"{LINK_PREFIX}{node}"


def links() -> list[str]:
    """The lab's links on the host: cables and bridge."""
    names = os.listdir("/sys/class/net")
    return sorted(name for name in names if name.startswith(LINK_PREFIX) or name == BRIDGE)


def delete_link(name: str) -> None:
    """Remove a link; one that is gone (the other end's namespace ended) is fine."""
    done = proc.run(["ip", "link", "delete", name])
    if done.status != 0 and Path("/sys/class/net", name).exists():
        done.check()


def bridge_owner() -> str:
    """The state directory of the lab that has the bridge; empty when there is no bridge."""
    try:
        return Path("/sys/class/net", BRIDGE, "ifalias").read_text().strip()
    except FileNotFoundError:
        return ""


def make_bridge(owner: str) -> None:
    """Make the bridge between the nodes, with the owner's name on it."""
    batch = (
        f"link add {BRIDGE} type bridge\nlink set {BRIDGE} alias {owner}\n"
        f"addr add {BRIDGE_ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}\nlink set {BRIDGE} up\n"
    )
    proc.run(["ip", "-batch", "-"], stdin=batch).check()


def memory_mb() -> int:
    """Memory of the host in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
