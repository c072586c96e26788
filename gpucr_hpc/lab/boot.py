"""Starts one node: run by the lab on the host as `python3 -m gpucr_hpc.lab.boot` with a NodeSpec as JSON on
stdin.

The program makes the PID namespace, forks the node's PID 1 into it, joins its network to the bridge, writes
the host's pid of PID 1 to spec.pid_file and ends; PID 1 makes the other namespaces and the mounts, pivots and
executes gpucr_hpc.lab.init with the node's own Python. Why by system calls and not by `ip netns` and
unshare(1): `ip netns exec` remounts /sys and hides the cgroup mounts; and a network namespace without a name
goes with its last process, so that a killed node leaves nothing.

cgroups: on version 1 the node sees the host's hierarchy (no cgroup namespace: slurmd looks for the real
root). On version 2 it gets a cgroup namespace below gpucr-lab/NODE (seen with scripts/gpu_slurm).
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gpucr_hpc.lab import kernel

V2_PARENT = "gpucr-lab"
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_PACKAGE = "usr/lib/python3/dist-packages/gpucr_hpc"


@dataclass(frozen=True)
class NodeFile:
    """A file written into the node before it starts; owner is a name of the node's own passwd."""

    data: bytes
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True)
class NodeSpec:
    """Everything that a node's start needs; paths are the host's.

    devices: more of them, by their path below /dev: major and minor number. host_directories: of the host, to be had
    below /host. links: symbolic links to be made in the node, by their path.
    """

    name: str
    role: str
    address: str
    prefix_length: int
    gateway: str
    bridge: str
    link: str
    lower: str  # root file system, layers above it in front, as overlayfs takes them
    work_dir: str
    shared: str
    package: str
    plugin: str
    pid_file: str
    cgroup_version: int
    devices: dict[str, list[int]]
    host_directories: list[str]
    links: dict[str, str]
    files: dict[str, NodeFile]

    def to_json(self) -> str:
        table = asdict(self)
        table["files"] = {
            path: {"data": base64.b64encode(file.data).decode(), "mode": file.mode, "owner": file.owner}
            for path, file in self.files.items()
        }
        return json.dumps(table)

    @staticmethod
    def from_json(text: str) -> NodeSpec:
        table = json.loads(text)
        files = {
            path: NodeFile(base64.b64decode(file["data"]), file["mode"], file["owner"])
            for path, file in table.pop("files").items()
        }
        return NodeSpec(**table, files=files)


def leave_cgroups(node: str, version: int, mounts: str) -> None:
    """Move this process to the root of every hierarchy, so that no limit or clean-up of the caller's reaches
    the lab.
    """
    if version == 2:
        own = Path("/sys/fs/cgroup") / V2_PARENT / node
        own.mkdir(parents=True, exist_ok=True)
        delegate(own.parent)
        (own / "cgroup.procs").write_text("0")
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        return
    for line in mounts.splitlines():
        _, target, kind = line.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            (Path(target) / "cgroup.procs").write_text("0")


def delegate(parent: Path) -> None:
    """Let the control groups below one have every controller that it has itself."""
    controllers = (parent / "cgroup.controllers").read_text().split()
    (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def _mount_tree(spec: NodeSpec) -> str:
    """All mounts of the node below its new root, which is returned; nothing propagates to the host."""
    work = Path(spec.work_dir)
    for name in ("upper", "work", "root"):
        (work / name).mkdir(parents=True, exist_ok=True)
    root = f"{work}/root"
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    layers = f"lowerdir={spec.lower},upperdir={work}/upper,workdir={work}/work"
    kernel.mount("overlay", root, "overlay", data=layers)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", f"{root}/proc", "proc", safe | kernel.MS_NOEXEC)
    kernel.mount("sysfs", f"{root}/sys", "sysfs", safe | kernel.MS_NOEXEC)
    if spec.cgroup_version == 2:
        kernel.mount("cgroup2", f"{root}/sys/fs/cgroup", "cgroup2", safe | kernel.MS_NOEXEC)
    else:
        kernel.bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", recursive=True)
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "mode=755")
    _devices(Path(root, "dev"), spec.devices)
    kernel.mount("tmpfs", f"{root}/run", "tmpfs", safe, "mode=755")
    kernel.mount("tmpfs", f"{root}/tmp", "tmpfs", safe, "mode=1777")  # noqa: S108
    kernel.bind(spec.shared, f"{root}/shared")
    kernel.bind(spec.package, f"{root}/{_PACKAGE}", read_only=True)
    kernel.bind(spec.plugin, f"{root}/usr/lib/gpucr", read_only=True)
    for directory in spec.host_directories:
        Path(f"{root}/host{directory}").mkdir(parents=True, exist_ok=True)
        kernel.bind(directory, f"{root}/host{directory}", recursive=True, read_only=True)
    for name, target in spec.links.items():
        Path(f"{root}{name}").unlink(missing_ok=True)
        Path(f"{root}{name}").symlink_to(target)
    return root


def _devices(dev: Path, more: dict[str, list[int]]) -> None:
    for name, (major, minor) in [*_DEVICES.items(), *more.items()]:
        (dev / name).parent.mkdir(exist_ok=True)
        _device(dev / name, major, minor)
    (dev / "net").mkdir()
    _device(dev / "net/tun", 10, 200)
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)
    (dev / "pts").mkdir()
    kernel.mount("devpts", f"{dev}/pts", "devpts", data="newinstance,ptmxmode=0666,mode=620,gid=5")
    (dev / "shm").mkdir()
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")


def _device(path: Path, major: int, minor: int) -> None:
    os.mknod(path, stat.S_IFCHR, os.makedev(major, minor))
    path.chmod(0o666)  # whatever the umask is


def _write_files(files: dict[str, NodeFile]) -> None:
    """Write the node's files, inside its root: owners are looked up in the node's passwd."""
    for name, file in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        owner = pwd.getpwnam(file.owner)
        with path.open("xb") as out:
            os.fchmod(out.fileno(), file.mode)
            os.fchown(out.fileno(), owner.pw_uid, owner.pw_gid)
            out.write(file.data)


def _become_node(spec: NodeSpec, unshared: Callable[[], None], joined: Callable[[], None]) -> None:
    """In PID 1 of the node: namespaces, mounts, files, then the node's init. Does not return."""
    os.setsid()
    os.umask(0o022)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    unshared()
    joined()
    socket.sethostname(spec.name)
    console = os.open(f"{spec.work_dir}/console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open("/dev/null", os.O_RDONLY)
    kernel.pivot_root(_mount_tree(spec))
    # As systemd leaves it: what the product mounts must not rely on a private root.
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_SHARED)
    _write_files(spec.files)
    for target, source in ((0, null), (1, console), (2, console)):
        os.dup2(source, target)
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    init = [
        "python3",
        "-m",
        "gpucr_hpc.lab.init",
        spec.role,
        f"{spec.address}/{spec.prefix_length}",
        spec.gateway,
    ]
    os.execve("/usr/bin/python3", init, env | {"LC_ALL": "C.UTF-8"})  # noqa: S606


def _join_bridge(spec: NodeSpec, pid: int) -> None:
    """Make the node's cable. `ip` is a child of ours and so in the node's PID namespace: the network
    namespace is named by its path in the host's /proc, which a bare pid would not find.
    """
    batch = (
        f"link add {spec.link} type veth peer name eth0 netns /proc/{pid}/ns/net\n"
        f"link set {spec.link} master {spec.bridge} up\n"
    )
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True, capture_output=True)


def main() -> int:
    """Start the node of the NodeSpec on stdin; 0 when its init runs, else 1 with the reason on stderr."""
    spec = NodeSpec.from_json(sys.stdin.read())
    leave_cgroups(spec.name, spec.cgroup_version, Path("/proc/self/mounts").read_text())
    unshared_r, unshared_w = os.pipe()
    joined_r, joined_w = os.pipe()
    failed_r, failed_w = os.pipe()
    kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(joined_w)
            _become_node(spec, lambda: _tell(unshared_w), lambda: _hear(joined_r))
        except BaseException as error:
            os.write(failed_w, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    for fd in (unshared_w, joined_r, failed_w):
        os.close(fd)
    try:
        if os.read(unshared_r, 1):
            _join_bridge(spec, pid)
            Path(spec.pid_file).write_text(f"{pid} {start_time(pid)}\n")
            _tell(joined_w)
    except subprocess.CalledProcessError as error:
        print(f"ip: {error.stderr.strip()}", file=sys.stderr)
    os.close(joined_w)
    # Every descriptor is close-on-exec: the end of file is the exec of the node's init.
    reason = os.read(failed_r, 4096).decode()
    if reason:
        os.waitpid(pid, 0)
        print(f"{spec.name}: {reason}", file=sys.stderr)
        return 1
    return 0


def _tell(fd: int) -> None:
    os.write(fd, b"x")


def _hear(fd: int) -> None:
    if not os.read(fd, 1):
        raise RuntimeError("the network cable could not be made")


def start_time(pid: int) -> int:
    """Start of a process in clock ticks (proc(5), field 22 of stat): with the pid it names one process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(re.sub(r"^.*\) ", "", text, flags=re.DOTALL).split()[19])


if __name__ == "__main__":
    sys.exit(main())
