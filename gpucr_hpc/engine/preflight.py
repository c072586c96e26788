"""What cannot be saved, found before anything is frozen: read from /proc, some milliseconds per process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpucr_hpc.capsule.processes import Process, namespace_of, strangers
from gpucr_hpc.engine import mappings, sessions, sockets

# Character devices that CRIU saves: null, zero, full, random, urandom, kmsg is not among them (mem(4)).
_SAVED_MEMORY_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}
_PTS_MAJORS, _PTMX = range(136, 144), (5, 2)
_TTY_MAJORS = {5, *_PTS_MAJORS}
_REFUSED_ANONYMOUS = {
    "anon_inode:[io_uring]": "io_uring ring",
    "anon_inode:[userfaultfd]": "userfaultfd",
    "anon_inode:[perf_event]": "performance counter (perf_event)",
    "anon_inode:[fanotify]": "fanotify group",
    "anon_inode:[landlock-ruleset]": "landlock rule set",
    "anon_inode:kvm-vm": "KVM virtual machine",
    "anon_inode:kvm-vcpu:0": "KVM virtual machine",
    "anon_inode:bpf-map": "BPF map",
    "anon_inode:bpf-prog": "BPF program",
    "anon_inode:seccomp": "seccomp listener",
    "anon_inode:[secretmem]": "secret memory",
}
_NO_PATHS = ("/memfd:", "/dmabuf:", "/secretmem", "/anon_hugepage", "/SYSV", "/dev/zero")
_NVIDIA = "/dev/nvidia"
_SHEPHERD = "gpucr-shepherd"  # still has what leads out, and lets go of it before the freeze
_PROCESS = re.compile(r"/proc/[0-9]+")  # criu/files-reg.c puts a slash behind it, and reads on
_CRIU_DESCRIPTORS, _TABLE_PART, _CAP_SYS_RESOURCE = 32, 128, 24
_MOST_PIPES = 1024  # criu/include/pipes.h, NR_PIPES_WITH_DATA
_TERMINAL_TRIES = 32  # criu/tty.c, pty_open_ptmx_index: free ones that it opens on its way to a number
_NESTED = ("pid", "ipc", "uts", "user", "cgroup", "time", "mnt", "net")


@dataclass(frozen=True)
class Finding:
    """One thing that stands against a checkpoint: which process, which object, why."""

    pid: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}): {self.what}"


def summary(findings: list[Finding], most: int = 5) -> str:
    """Findings in one line, those of the same kind together; empty when there are none."""
    alike: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        alike.setdefault((finding.name, finding.what), []).append(finding.pid)
    lines = [
        f"{name} (pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}): {what}"
        for (name, what), pids in alike.items()
    ]
    return "; ".join(lines[:most])


def check(
    processes: list[Process], root_nspid: int, *, gpus: bool = False, reconnecting: Sequence[str] = ()
) -> list[Finding]:
    """Everything that CRIU would refuse or lose; `processes` are all of the namespace, init first.

    gpus: devices of the NVIDIA driver are not looked at here, engine.cuda does it. reconnecting: as
    EngineConfig.reconnecting.
    """
    findings = [
        Finding(p.nspid, p.name, "is not below the job's holder and would be lost")
        for p in strangers(processes, root_nspid)
    ]
    root = next((p for p in processes if p.nspid == root_nspid), None)
    if root is None:
        return [Finding(root_nspid, "holder", "is gone")]
    reference = {kind: namespace_of(root.pid, kind) for kind in _NESTED}
    tree = _Tree(reference, _mounts(processes[1:]), gpus, reconnecting)
    for process in processes[1:]:
        if process.state == "Z" and process.threads > 1:
            findings.append(Finding(process.nspid, process.name, "its first thread has ended, and others still run"))
        elif process.state != "Z":
            findings += [Finding(process.nspid, process.name, what) for what in _objects(process, tree)]
    findings += [Finding(root_nspid, "job", what) for what in _of_all(tree, root.pid)]
    lost = set(sessions.unrestorable(sessions.of(processes[1:]), root.pid))
    why = "is in a session that its parent has left, and that CRIU cannot make again for it"
    findings += [Finding(p.nspid, p.name, why) for p in processes[1:] if p.pid in lost]
    return findings


@dataclass(frozen=True)
class _Tree:
    """What holds for all processes. reference: namespaces of the holder; mounts: ids. Seen so far: pipes that a task
    has, and those that somebody can read; numbers of pseudo terminals."""

    reference: dict[str, str | None]
    mounts: set[str]
    gpus: bool
    reconnecting: Sequence[str]
    pipes: set[str] = field(default_factory=set)
    terminals: set[int] = field(default_factory=set)
    read: set[str] = field(default_factory=set)


def _of_all(tree: _Tree, root: int) -> Iterator[str]:
    pipes = len(tree.read & tree.pipes)
    if pipes > _MOST_PIPES:
        yield f"has {pipes} pipes, and CRIU saves {_MOST_PIPES}"
    for count, number in enumerate(sorted(tree.terminals)):
        if number - count >= _TERMINAL_TRIES:
            yield f"has the terminal /dev/pts/{number} and few below it, and CRIU does not reach that number"
            break
    groups = _multicast_groups(root)
    if groups:
        yield f"receives multicast of {', '.join(groups)}: memberships are not saved"


def _multicast_groups(pid: int) -> list[str]:
    """IPv4 groups that sockets in a network namespace have joined: /proc/net/igmp, as hexadecimal of this machine."""
    try:
        with open(f"/proc/{pid}/net/igmp") as file:
            words = {line.split()[0] for line in file if line.startswith("\t")}
    except OSError:
        return []
    groups = {socket.inet_ntoa(int(word, 16).to_bytes(4, sys.byteorder)) for word in words}
    return sorted(groups - {"224.0.0.1"})  # all hosts: the kernel is in it


def _mounts(processes: list[Process]) -> set[str]:
    """Ids of all mounts that a process sees: what CRIU finds the files of descriptors by."""
    namespaces = {namespace_of(process.pid, "mnt"): process.pid for process in reversed(processes)}
    seen: set[str] = set()
    for pid in namespaces.values():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mountinfo", errors="replace") as file:
            seen.update(line.split(" ", 1)[0] for line in file)
    return seen


def _objects(process: Process, tree: _Tree) -> Iterator[str]:
    if process.tracer:
        yield f"is traced by pid {process.tracer} (debugger, strace or profiler): detach it"
    for kind in _NESTED if process.name != _SHEPHERD else ():
        own = namespace_of(process.pid, kind)
        if own is not None and own != tree.reference[kind]:
            yield f"has a {kind} namespace of its own (container or sandbox)"
    yield from _descriptors(process, tree)
    yield from mappings.unsaved(process.pid, gpus=tree.gpus)


def _descriptors(process: Process, tree: _Tree) -> Iterator[str]:
    pid, ours = process.pid, process.name == _SHEPHERD
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return
    highest = max(map(int, numbers), default=0)
    if highest + _CRIU_DESCRIPTORS > (limit := _descriptor_limit()):
        yield f"descriptor {highest} has too high a number: CRIU needs room below this node's limit of {limit}"
    held = []
    for number in numbers:
        path = f"{directory}/{number}"
        try:
            target, status = os.readlink(path), os.stat(path)
            if target.startswith("pipe:"):
                if not ours:
                    tree.pipes.add(target)
                if os.lstat(path).st_mode & stat.S_IRUSR:  # this end can be read
                    tree.read.add(target)
        except OSError:
            continue
        if tree.gpus and target.startswith(_NVIDIA):
            continue
        if stat.S_ISSOCK(status.st_mode):
            held.append(number)
        elif target in _REFUSED_ANONYMOUS:
            yield f"descriptor {number} is an {_REFUSED_ANONYMOUS[target]}".replace("an p", "a p")
        elif "/infiniband/" in target:
            yield f"descriptor {number} is the RDMA device {target}, whose state is in it: have the job use TCP"
        elif _PROCESS.fullmatch(target):
            yield f"descriptor {number} is the directory {target} of a process, which CRIU takes for another file"
        elif stat.S_ISCHR(status.st_mode):
            if (terminal := _terminal(pid, number, status.st_rdev)) is not None:
                tree.terminals.add(terminal)
            reason = _device(status.st_rdev)
            if reason:
                yield f"descriptor {number} is the device {target}{reason}"
        elif stat.S_ISBLK(status.st_mode):
            yield f"descriptor {number} is the block device {target}"
        elif not ours and _named(target, status.st_mode) and _mount_of(pid, number) not in (None, *tree.mounts):
            yield f"descriptor {number} ({target}) is a POSIX message queue, or of a file system that is not mounted"
    services = ("*",) if ours else tree.reconnecting  # the shepherd lets go of the agent's before the freeze
    for number, what in sockets.unsaved(pid, held, services) if held else ():
        yield f"descriptor {number} is {what}, which cannot be saved"


def _terminal(pid: int, number: str, device: int) -> int | None:
    """The number of a pseudo terminal, of either end."""
    if os.major(device) in _PTS_MAJORS:
        return os.minor(device) + 256 * (os.major(device) - _PTS_MAJORS[0])
    if (os.major(device), os.minor(device)) == _PTMX:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{number}") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("tty-index:")), None)
    return None


def _named(target: str, mode: int) -> bool:
    """A file or directory with a path, also a former one; memory and what the kernel makes up has a name at most."""
    kind = stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR)
    return kind and target.startswith("/") and not target.startswith(_NO_PATHS)


def _mount_of(pid: int, number: str) -> str | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{number}") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return line.split()[1]
    return None


def _descriptor_limit() -> int:
    """Number of descriptors that CRIU can have at a restore, in whole parts of its table (criu/servicefd.c)."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError), open("/proc/self/status") as status, open("/proc/sys/fs/nr_open") as most:
        held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
        if held >> _CAP_SYS_RESOURCE & 1:  # CRIU raises its limit then
            limit = int(most.read())
    return limit // _TABLE_PART * _TABLE_PART


def _device(rdev: int) -> str | None:
    """Why a character device cannot be saved; None when it can."""
    major, minor = os.major(rdev), os.minor(rdev)
    if (major, minor) in _SAVED_MEMORY_DEVICES or major in _TTY_MAJORS:
        return None
    return ", whose state is not in the image"
