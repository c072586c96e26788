"""What cannot be saved, found on living processes that this test makes."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from gpucr_hpc.capsule.processes import Process, read_process
from gpucr_hpc.engine import preflight

_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_SEIZE = 0x4206
# System calls by number: Python has no names for them. x86-64 and arm64 agree from 424 on.
_MAKE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
{code}
print("ready", flush=True)
time.sleep(60)
"""
_IO_URING = """
fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
sys.exit(7) if fd < 0 else None
"""
_USERFAULTFD = """
fd = libc.syscall(323 if os.uname().machine == "x86_64" else 282, 1)
sys.exit(7) if fd < 0 else None
"""
_DEVICE = """
for name in ("/dev/kmsg", "/dev/fuse", "/dev/net/tun", "/dev/vsock"):
    try:
        os.open(name, os.O_RDONLY)
        break
    except OSError:
        continue
else:
    sys.exit(7)
"""
_MMAP = """
libc.mmap.restype = ctypes.c_void_p
taken = libc.mmap(None, ctypes.c_size_t({size}), {access}, {flags}, -1, ctypes.c_long(0))
sys.exit(7) if taken == ctypes.c_void_p(-1).value else None
"""
_MQUEUE = """
fd = libc.mq_open(b"/gpucr-test-%d" % os.getpid(), os.O_RDWR | os.O_CREAT, 0o600, None)
libc.mq_unlink(b"/gpucr-test-%d" % os.getpid())
sys.exit(7) if fd < 0 else None
"""
_UNMOUNTED = """
import subprocess, tempfile
place = tempfile.mkdtemp()
if libc.unshare(0x20000) or os.system(f"mount --make-rprivate / && mount -t tmpfs none {place}"):
    sys.exit(7)
kept = open(f"{place}/file", "w")
os.system(f"umount -l {place}")
os.rmdir(place)
"""
_SOCKET = """
import socket
try:
    kept = socket.socket({family}, socket.SOCK_STREAM, {protocol})
except OSError:
    sys.exit(7)
"""
_PLAIN = """
import mmap, socket, tempfile
kept = [open("/dev/null"), open("/dev/urandom", "rb"), open("/dev/zero", "rb"), os.pipe(), socket.socketpair()]
kept += [tempfile.TemporaryFile(), os.memfd_create("m"), mmap.mmap(-1, 8192), os.eventfd(0), os.pidfd_open(os.getpid())]
kept += [socket.socket(*of) for of in ((2, 1), (2, 2), (10, 1), (10, 2), (1, 2), (1, 5), (16, 3, 0))]
kept += [open("/proc/self/maps"), open("/sys/kernel/mm/transparent_hugepage/enabled"), os.open("/", os.O_RDONLY)]
kept += [os.openpty()]
"""


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a Python child that runs some code and then waits; skip when the kernel refuses what it asks for."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *before: str) -> subprocess.Popen[str]:
        argv = [*before, sys.executable, "-c", _MAKE.format(code=code)]
        made = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        started.append(made)
        assert made.stdout is not None
        if made.stdout.readline() != "ready\n":
            pytest.skip(f"not possible here: {' '.join(before) or 'the system call is refused'}")
        return made

    yield start
    for made in started:
        made.kill()
        made.wait()
        assert made.stdout is not None
        made.stdout.close()


def whole(pid: int) -> list[str]:
    """preflight's word on a job of one child, which is the holder, too."""
    init = Process(pid=-1, nspid=1, ppid=0, name="gpucr-init", state="S", uid=0, tracer=0, threads=1)
    holder = read_process(pid)
    assert holder is not None
    return [f.what for f in preflight.check([init, holder], holder.nspid) if f.name == "job"]


def findings(pid: int) -> list[str]:
    """preflight's word on a child of ours: we are the holder, and its init is made up."""
    init = Process(pid=-1, nspid=1, ppid=0, name="gpucr-init", state="S", uid=0, tracer=0, threads=1)
    holder, task = read_process(os.getpid()), read_process(pid)
    assert holder is not None
    assert task is not None
    found = preflight.check([init, holder, task], holder.nspid)
    return [str(f) for f in found if f.pid == task.nspid]


def test_ordinary_process_is_welcome(child):
    """Pipes, sockets, files, memory, terminals and harmless devices."""
    assert [] == findings(child(_PLAIN + _MMAP.format(size="1 << 42", access=0, flags=0x4022)).pid)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (_IO_URING, "io_uring"),
        (_USERFAULTFD, "userfaultfd"),
        (_DEVICE, "is the device /dev/"),
        (_MQUEUE, "is a POSIX message queue"),
        (_MMAP.format(size="1 << 21", access=3, flags=0x40022), "has private huge pages (MAP_HUGETLB)"),
        (_MMAP.format(size="1 << 42", access=0, flags=0x22), "has 4096 GiB of addresses reserved"),
        ("os.open(f'/proc/{os.getppid()}', os.O_PATH)", "of a process, which CRIU takes for another file"),
        (_UNMOUNTED, "of a file system that is not mounted"),
        (_SOCKET.format(family="socket.AF_VSOCK", protocol=0), "a socket of the family AF_VSOCK, which"),
        (_SOCKET.format(family="socket.AF_INET6", protocol=262), "an MPTCP socket (in Go programs GODEBUG="),
        (_SOCKET.format(family="socket.AF_INET", protocol=132), "an SCTP socket, which cannot be saved"),
    ],
)
def test_object_without_a_way_back_is_named(child, code, word):
    """Process, descriptor and kind are in the sentence."""
    made = child(code)
    found = findings(made.pid)
    assert any(word in line for line in found), found
    assert all(f"(pid {made.pid})" in line for line in found)


_PIPES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.pipe() for _ in range({number})]
"""
_MULTICAST = """
import socket
libc.unshare(0x40000000) and sys.exit(7)
os.system("ip link set lo up") and sys.exit(7)
kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
membership = socket.inet_aton("239.1.2.3") + socket.inet_aton("127.0.0.1")
kept.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
"""


@pytest.mark.parametrize(("number", "refused"), [(1024, False), (1025, True)])
def test_more_pipes_than_criu_saves(child, number, refused):
    """Both ends of a pipe are one; the limit is the whole job's."""
    found = whole(child(_PIPES.format(number=number)).pid)
    assert refused == (f"has {number} pipes, and CRIU saves 1024" in " ".join(found))


def test_multicast_group_is_named(child):
    made = child(_MULTICAST)
    assert ["receives multicast of 239.1.2.3: memberships are not saved"] == whole(made.pid)


def test_the_shepherd_may_hold_what_is_outside(child):
    """Output files of the job were opened in another mount namespace; it lets go of them before the freeze."""
    made = child(_UNMOUNTED + "libc.prctl(15, b'gpucr-shepherd', 0, 0, 0)\n")
    assert [] == findings(made.pid)


def test_a_descriptor_near_the_limit_is_named(child, monkeypatch):
    """CRIU's own descriptors have the highest numbers; valgrind takes them, too."""
    made = child("os.dup2(1, 300)")
    monkeypatch.setattr(preflight, "_descriptor_limit", lambda: 332)
    assert [] == findings(made.pid)
    monkeypatch.setattr(preflight, "_descriptor_limit", lambda: 331)
    assert any("descriptor 300 has too high a number" in line for line in findings(made.pid))


def test_limit_of_descriptors():
    assert preflight._descriptor_limit() % 128 == 0
    assert preflight._descriptor_limit() > 128


_NO_FIRST_THREAD = """
import threading
def other():
    time.sleep(0.2)
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=other).start()
libc.pthread_exit(None)
"""


def test_process_without_its_first_thread_is_named(child):
    """CRIU: "Zombies with threads are not supported"."""
    made = child(_NO_FIRST_THREAD)
    assert any("its first thread has ended" in line for line in findings(made.pid)), findings(made.pid)


def test_rdma_device_is_named(child, tmp_path):
    """Queue pairs live in the adapter; a descriptor of its device is enough to refuse."""
    device = tmp_path / "infiniband/uverbs0"
    device.parent.mkdir()
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(231, 192))
    except PermissionError:
        pytest.skip("device nodes need root")
    made = child(f"os.open({str(device)!r}, os.O_PATH)")  # no driver is needed for that
    (found,) = findings(made.pid)
    assert f"is the RDMA device {device}" in found
    assert "use TCP" in found


def test_traced_process_is_named(child):
    """A process has one tracer, and CRIU must be it."""
    made = child("")
    if _LIBC.ptrace(_PTRACE_SEIZE, made.pid, 0, 0) != 0:
        pytest.skip(f"ptrace is refused: {os.strerror(ctypes.get_errno())}")
    assert [f"is traced by pid {os.getpid()}"] == [line.split(": ", 1)[1].split(" (")[0] for line in findings(made.pid)]


@pytest.mark.parametrize(("option", "kind"), [("--uts", "uts"), ("--ipc", "ipc"), ("--user", "user")])
def test_nested_namespace_is_named(child, option, kind):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    made = child("", "unshare", option)
    assert any(f"has a {kind} namespace of its own" in line for line in findings(made.pid))


def test_daemon_outside_the_tree_is_named(child):
    """A process that does not descend from the holder would be lost silently."""
    init = Process(pid=-1, nspid=1, ppid=0, name="gpucr-init", state="S", uid=0, tracer=0, threads=1)
    holder, stray = read_process(os.getpid()), read_process(child("").pid)
    assert holder is not None
    assert stray is not None
    outside = Process(**{**vars(stray), "ppid": -1})
    found = [f for f in preflight.check([init, holder, outside], holder.nspid) if f.pid == outside.nspid]
    assert "is not below the job's holder and would be lost" == found[0].what


def test_holder_that_is_gone():
    init = Process(pid=-1, nspid=1, ppid=0, name="gpucr-init", state="S", uid=0, tracer=0, threads=1)
    assert ["holder (pid 2): is gone"] == [str(f) for f in preflight.check([init], 2)]


def test_takes_milliseconds(child):
    pid = child(_PLAIN).pid
    start = time.process_time()
    findings(pid)
    assert time.process_time() - start < 0.1


def test_findings_of_a_kind_are_said_together():
    alike = [preflight.Finding(pid, "python3", "holds a ring") for pid in (5, 6)]
    other = preflight.Finding(9, "sh", "is traced")
    assert preflight.summary([*alike, other]) == "python3 (pids 5, 6): holds a ring; sh (pid 9): is traced"
    assert preflight.summary([]) == ""
