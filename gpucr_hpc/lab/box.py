"""`scripts/box CMD...`: a command as if it were alone on the machine, so that labs can run side by side. Root only.

The command has pid, network (loopback only), mount, ipc, uts and cgroup namespaces of its own, an empty /run, and in
$GPUCR_LAB a place for a lab; other files are the machine's, the cache with the lab's root file system among them. There
is no way out to a network: what a lab is built from must be there before (`scripts/lab build --layer all`).

Three processes: the *front*, which the caller started and waits for; below it the box's PID 1, which reaps and whose
end is the end of all in the box; beside it a *janitor* in a session of its own, which sees the front end (also by
kill -9), kills what is left, and removes the box's cgroups and directory. Should somebody kill the janitor too, the
next box does its work: a box's directory is locked while one of the two lives.

cgroups: below one directory of the box in each hierarchy, which the cgroup namespace makes the root that the command
sees. Version 1 and hybrid hosts are what the tests run on. Version 2 is written from cgroups(7) and
cgroup_namespaces(7), and was seen without controllers only: there PID 1 goes to a leaf, since a cgroup with processes
in it gives no controllers to those below.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import host, kernel
from gpucr_hpc.lab.boot import delegate
from gpucr_hpc.lab.cluster import default_state
from gpucr_hpc.lab.wait import wait_until

_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)
_END_LIMIT_S = 30.0
_LOCK = Path("/run/lock/gpucr-box.lock")


@dataclass(frozen=True)
class Hierarchy:
    """A cgroup hierarchy: where it is mounted, and what mounts it again. kind: cgroup (version 1) or cgroup2."""

    path: Path
    kind: str
    options: str


def hierarchies(mountinfo: str, controllers: Collection[str]) -> list[Hierarchy]:
    """The hierarchies below /sys/fs/cgroup. controllers: the kernel's names, to tell them from other mount options."""
    found = {}
    for line in mountinfo.splitlines():
        fields = line.split()
        target, (kind, _, options) = Path(fields[4]), fields[fields.index("-") + 1 :][:3]
        if kind in ("cgroup", "cgroup2") and target.is_relative_to(host.CGROUPS):
            words = options.split(",") if kind == "cgroup" else []
            named = [word for word in words if word.startswith("name=")]
            chosen = [word for word in words if word in controllers]
            found[target] = Hierarchy(target, kind, ",".join(chosen + ["none"] * (not chosen) * bool(named) + named))
    return list(found.values())


def _hierarchies() -> list[Hierarchy]:
    controllers = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
    found = hierarchies(Path("/proc/self/mountinfo").read_text(), controllers)
    if not found:
        raise LabError(reason=f"no box: no cgroup hierarchy below {host.CGROUPS}")
    return found


# --- outside: directory and cgroups ---


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Nobody else makes a box or looks for dead ones."""
    _LOCK.parent.mkdir(parents=True, exist_ok=True)
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(found: list[Hierarchy]) -> tuple[Path, int]:
    """A new box's directory, the descriptor that locks it, and its cgroups. Dead boxes that are left are removed."""
    prefix = f"{default_state().name}.box-"
    default_state().parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time():
        for path in default_state().parent.glob(f"{prefix}*"):
            with suppress(FileNotFoundError, BlockingIOError):
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, found)
                finally:
                    os.close(lock)
        box = Path(tempfile.mkdtemp(prefix=prefix, dir=default_state().parent))
        lock = os.open(box, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    box.chmod(0o755)
    try:
        for hierarchy in found:
            own = hierarchy.path / box.name
            own.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                if hierarchy.kind == "cgroup" and (own / name).exists():  # empty at first, and then nobody may enter
                    (own / name).write_text((hierarchy.path / name).read_text())
    except OSError as error:
        _remove(box, found)
        raise LabError(reason=f"no box: cannot make the cgroup {error.filename}: {error.strerror}") from error
    return box, lock


def _remove(box: Path, found: list[Hierarchy]) -> None:
    """Kill all processes of a box, then remove its cgroups and its directory. LabError with a cgroup that stays."""
    tops = [hierarchy.path / box.name for hierarchy in found]
    wait_until(lambda: not [top for top in tops if _busy(top)], _END_LIMIT_S, f"the end of the processes in {tops[0]}")
    shutil.rmtree(box)


def _busy(top: Path) -> bool:
    """Kill what is in a cgroup and below, and try to remove it."""
    for path in host.below(top):
        with suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                host.kill_if_there(int(pid))
    host.thaw_below(top)
    for path in host.below(top):
        with suppress(OSError):
            path.rmdir()
    return top.exists()


# --- inside: PID 1 ---


def _enter(box: Path, found: list[Hierarchy]) -> None:
    """Make this process, PID 1 of its namespace, see nothing but the box."""
    for hierarchy in found:
        (hierarchy.path / box.name / "cgroup.procs").write_text("0")
    kernel.unshare(_NAMESPACES)
    links = [(path, os.readlink(path)) for path in host.CGROUPS.iterdir() if path.is_symlink()]
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", "/run", "tmpfs", safe, "mode=755")
    for name in ("lock", "netns"):
        Path("/run", name).mkdir()
    kernel.detach(str(host.CGROUPS))
    kernel.mount("sysfs", "/sys", "sysfs", safe | kernel.MS_NOEXEC)
    if found[0].path == host.CGROUPS:
        kernel.mount("cgroup2", str(host.CGROUPS), "cgroup2", safe | kernel.MS_NOEXEC)
        leaf = host.CGROUPS / "box.scope"
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text("0")
        delegate(host.CGROUPS)
    else:
        kernel.mount("tmpfs", str(host.CGROUPS), "tmpfs", safe, "mode=755")
        for hierarchy in found:
            hierarchy.path.mkdir()
            options = hierarchy.options
            kernel.mount(hierarchy.kind, str(hierarchy.path), hierarchy.kind, safe | kernel.MS_NOEXEC, options)
        for path, target in links:
            path.symlink_to(target)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["GPUCR_LAB"] = str(box / "lab")


def _be_init(box: Path, found: list[Hierarchy], argv: Sequence[str]) -> NoReturn:
    """Run the command, reap for it, and end with its exit status (128+N: signal N)."""
    status = 1
    try:
        _enter(box, found)
        child = os.fork()
        if child == 0:
            _become(argv)
        _leave_keys_to_others()
        while (reaped := os.wait())[0] != child:
            pass
        status = _status(reaped[1])
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        for hierarchy in found:  # the kernel waits for all of them before this process is gone
            host.thaw_below(hierarchy.path)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"box: error: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def _become(argv: Sequence[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606
    except OSError as error:
        print(f"box: error: {argv[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def _status(waited: int) -> int:
    """As a shell has it: 128+N for signal N."""
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


def _leave_keys_to_others() -> None:
    """Ctrl-C is for the command: who waits for it goes on to wait."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


# --- front and janitor ---


def _be_janitor(box: Path, found: list[Hierarchy], front: int) -> NoReturn:
    """Wait for the end of the front, which has the other end of this pipe, then remove the box."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.read(front, 1)
    try:
        _remove(box, found)
    except (GpucrError, OSError) as error:
        print(f"box: error: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def run(argv: Sequence[str]) -> int:
    """Run a command in a box of its own; its exit status (128+N: signal N). LabError when there can be no box."""
    if os.geteuid() != 0:
        raise LabError(reason="a box needs root (namespaces, mounts, cgroups)")
    found = _hierarchies()
    box, lock = _make(found)
    watched, held = os.pipe()
    janitor = os.fork()
    if janitor == 0:
        os.close(held)
        _be_janitor(box, found, watched)
    os.close(watched)
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        first = os.fork()
        if first == 0:
            os.close(held)
            os.close(lock)
            _be_init(box, found, argv)
        _leave_keys_to_others()
        return _status(os.waitpid(first, 0)[1])
    finally:
        os.close(held)
        if os.waitpid(janitor, 0)[1] != 0 and box.exists():
            _remove(box, found)


def main(args: Sequence[str] | None = None) -> int:
    """`scripts/box`."""
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: box CMD...\nRun a command in a box: own namespaces, cgroups, /run and lab (root).")
        return 0 if argv else 2
    try:
        return run(argv)
    except GpucrError as error:
        print(f"box: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
