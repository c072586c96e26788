"""Control groups and processes as /proc has them."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpucr_hpc.capsule import cgroup, processes
from gpucr_hpc.capsule.processes import (
    Process,
    namespace_of,
    namespace_processes,
    read_process,
    start_time,
    strangers,
)
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.errors import HostError

HYBRID = """13:memory:/slurm_n1/uid_2001/job_7/step_batch/task_0
12:cpu,cpuacct:/
1:name=systemd:/system.slice
0::/a:b/step_batch
"""
MOUNTS = """24 1 0:21 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw
25 1 0:22 / {root}/memory rw shared:4 - cgroup cgroup rw,memory
26 1 0:23 / {root}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
27 1 8:1 / / rw - ext4 /dev/sda1 rw,memory
"""


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """/proc with one process of a step, and memory and cpu hierarchies below tmp_path."""
    texts = {"/proc/7/cgroup": HYBRID, "/proc/self/mountinfo": MOUNTS.format(root=tmp_path)}

    class FakePath(type(tmp_path)):
        def read_text(self, *args, **kwargs):
            known = texts.get(str(self))
            return super().read_text(*args, **kwargs) if known is None else known

    monkeypatch.setattr(cgroup, "Path", FakePath)
    return texts


def test_memberships(proc):
    found = cgroup.memberships(7)
    assert "/slurm_n1/uid_2001/job_7/step_batch/task_0" == found["memory"]
    assert "/a:b/step_batch" == found[""], "a path may have a colon"
    assert {"memory", "cpu,cpuacct", "name=systemd", ""} == set(found)


def test_slurms_step_is_recognised(proc):
    """And whose it is: users may say what they like."""
    assert cgroup.slurm_job(7) == "7"
    proc["/proc/7/cgroup"] = "0::/system.slice/slurmstepd.scope/job_184/step_0/user/task_0\n"
    assert cgroup.slurm_job(7) == "184"
    for outside in ("0::/system.slice/slurmd.service\n", "0::/user.slice/job_7/step_1\n", "5:memory:/\n"):
        proc["/proc/7/cgroup"] = outside
        assert cgroup.slurm_job(7) == ""


def test_process_is_put_into_every_group(proc, tmp_path):
    memory = tmp_path / "memory/slurm_n1/uid_2001/job_7/step_batch/task_0"
    for directory in (memory, tmp_path / "cpu,cpuacct"):
        directory.mkdir(parents=True)
    proc["/proc/7/cgroup"] = HYBRID.replace("0::/a:b/step_batch\n", "")
    cgroup.place(99, like=7)
    assert "99" == (memory / "cgroup.procs").read_text() == (tmp_path / "cpu,cpuacct/cgroup.procs").read_text()


def test_slurms_group_must_be_entered(proc, tmp_path):
    """Its limits would not hold otherwise; another one's refusal costs nothing."""
    with pytest.raises(HostError, match="cannot move pid 99"):
        cgroup.place(99, like=7)
    proc["/proc/7/cgroup"] = "12:cpu,cpuacct:/gone\n"
    cgroup.place(99, like=7)


def test_own_process():
    me = read_process(os.getpid())
    assert me is not None
    assert (os.getpid(), os.getppid(), os.geteuid(), 0) == (me.pid, me.ppid, me.uid, me.tracer)
    assert me in [replaced(p, me) for p in namespace_processes(os.getpid()) if p.pid == me.pid]


def replaced(process: Process, like: Process) -> Process:
    """State and threads change while we look."""
    return Process(**{**vars(process), "state": like.state, "threads": like.threads})


def test_process_that_is_being_reaped(tmp_path, monkeypatch):
    """As Linux 6.18 showed it, once in some hundred looks at short-lived processes: it would come before init."""
    text = (
        "Name:\ttrue\nState:\t{state}\nPPid:\t7\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nNSpid:\t{pids}\nThreads:\t{threads}\n"
    )

    class Status(type(tmp_path)):
        def read_text(self, *_args, **_more):
            return said

    monkeypatch.setattr(processes, "Path", Status)
    said = text.format(state="Z (zombie)", pids="9\t4", threads=1)
    assert 4 == read_process(9).nspid
    said = text.format(state="X (dead)", pids="0\t0", threads=0)
    assert read_process(9) is None


def test_process_that_is_gone():
    done = subprocess.Popen(["true"])
    done.wait()
    assert read_process(done.pid) is start_time(done.pid) is namespace_of(done.pid, "pid") is None
    assert [] == namespace_processes(done.pid)


def test_start_time_names_a_process():
    first, second = start_time(os.getpid()), start_time(1)
    assert first is not None
    assert second is not None
    assert first > second >= 0
    assert first == start_time(os.getpid())


def process(pid: int, ppid: int, state: str = "S") -> Process:
    return Process(pid=100 + pid, nspid=pid, ppid=100 + ppid, name=f"p{pid}", state=state, uid=1, tracer=0, threads=1)


def test_strangers():
    """Whoever does not descend from the holder would be lost; init and zombies do not count."""
    init, holder, shepherd = process(1, 0), process(2, 1), process(3, 2)
    task, stray, child, dead = process(4, 3), process(5, 1), process(6, 5), process(7, 1, "Z")
    assert [stray, child] == strangers([init, holder, shepherd, task, stray, child, dead], 2)


def test_run_directory(tmp_path):
    run = RunDir.of(str(tmp_path), "7")
    assert [] == RunDir.all(str(tmp_path))
    run.make(os.getuid(), os.getgid())
    assert None is run.load()
    run.save({"phase": "running"})
    assert ({"phase": "running"}, 0o600) == (run.load(), (run.path / "state.json").stat().st_mode & 0o777)
    assert (0o711, 0o711, 0o700, 0o700) == tuple(
        p.stat().st_mode & 0o777 for p in (run.path, run.images, run.work, run.path / "user")
    )
    assert [run] == RunDir.all(str(tmp_path))
    (run.path / "state.json").write_text('{"half')
    assert None is run.load()
    run.make(os.getuid(), os.getgid())
    assert None is run.load(), "made afresh"
    run.remove()
    run.remove()
    assert not run.path.exists()
