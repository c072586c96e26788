"""Supervisor, init, holder and shepherd together, without Slurm and CRIU (root)."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gpucr_hpc.wire import Type, make

from .capsule_lab import INIT, TASK, USER, Lab, fds_of, finish, finish_reading, status_of, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not INIT.exists() or not TASK.exists(), reason="spank_plugin is not built"),
]


def test_capsule_has_its_shape(up: Lab) -> None:
    """init is PID 1 on the host pid of READY; holder and shepherd are the user's, dumpable, with clean descriptors."""
    found = up.processes()
    assert {"gpucr-init", "gpucr-holder", "gpucr-shepherd"} == set(found)
    assert up.init_pid == found["gpucr-init"]
    for name in ("gpucr-holder", "gpucr-shepherd"):
        status = status_of(found[name])
        assert [str(USER)] * 4 == status["Uid"].split() == status["Gid"].split()
        assert f"4242 {USER}" == status["Groups"]
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert os.stat(f"/proc/{found[name]}/fd").st_uid == USER, "not dumpable"
    assert str(up.holder) == status_of(found["gpucr-holder"])["NSpid"].split()[-1]
    assert {0: "/dev/null", 1: "/dev/null", 2: "/dev/null"} == fds_of(found["gpucr-holder"])
    shepherd = fds_of(found["gpucr-shepherd"])
    assert {"/dev/null"} == {shepherd.pop(i) for i in range(3)}
    assert ["anon_inode:[signalfd]", "socket:"] == sorted(
        v.split("[")[0] if "so" in v else v for v in shepherd.values()
    )
    assert b"" == Path(f"/proc/{found['gpucr-holder']}/environ").read_bytes()
    mounts = {line.split()[0] for line in Path(f"/proc/{found['gpucr-holder']}/mountinfo").read_text().splitlines()}
    stdio = Path(f"/proc/{found['gpucr-holder']}/fdinfo/0").read_text()
    assert dict(line.split(":\t") for line in stdio.splitlines())["mnt_id"] in mounts


def test_capsule_view_of_the_system(up: Lab) -> None:
    """Host name, hosts file, private directories and /proc are the capsule's own."""
    task, agent = up.start(
        "sh", "-c", "hostname; grep -c capsule-test /etc/hosts; ls -A /tmp /dev/shm | wc -l; echo $$; stat -c %a /tmp"
    )
    code, out, err, _ = finish(task, agent)
    name, hosts, entries, pid, mode = out.decode().split()
    assert (0, b"", "capsule-test", "1", "3", "1777") == (code, err, name, hosts, entries, mode)
    assert int(pid) < 100


def test_own_network_keeps_cgroups_in_sight(lab: Lab) -> None:
    """With a network namespace /sys is new, and /sys/fs/cgroup is still there."""
    before = sorted(os.listdir("/sys/fs/cgroup"))
    holder = subprocess.Popen(["unshare", "-n", "sleep", "60"])
    try:
        wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        netns = os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY)
        assert Type.READY == lab.capsule("--netns", str(netns), "--cgroup-wait", "--tmpfs-size", "1048576").type
        os.close(netns)
        task, agent = lab.start(
            "sh", "-c", "ls /sys/class/net; ls -A /sys/fs/cgroup; df -k --output=size /tmp | tail -1"
        )
        code, out, _, _ = finish(task, agent)
    finally:
        holder.kill()
        holder.wait()
    lines = out.decode().split()
    assert (0, "lo", "1024") == (code, lines[0], lines[-1])
    assert before == sorted(lines[1:-1])


def test_setup_failure_is_told(lab: Lab) -> None:
    """A step that fails is named in FAILED, and nothing stays behind."""
    failed = lab.capsule("--private", "/no/such/place")
    assert Type.FAILED == failed.type
    assert "/no/such/place" in failed.get("MSG")
    with pytest.raises(EOFError):
        lab.control.receive()  # type: ignore[union-attr]


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -USR1 $$", -signal.SIGUSR1), ("true", 0)])
def test_exit_status_comes_out(up: Lab, command: str, code: int) -> None:
    task, agent = up.start("sh", "-c", command)
    got, _, _, ended = finish(task, agent)
    assert code == got
    assert code == os.waitstatus_to_exitcode(ended.int("STATUS"))
    assert "0" == ended.get("NOTICE")


def test_command_not_found(up: Lab) -> None:
    task, agent = up.start("/no/such/program")
    code, _, err, _ = finish(task, agent)
    assert 127 == code
    assert b"gpucr: could not run /no/such/program: No such file or directory\n" == err


def test_surroundings_are_passed(up: Lab, tmp_path: Path) -> None:
    """cwd, umask, limits, nice, affinity, environment and the agent's additions reach the task."""
    script = "pwd; umask; ulimit -n; ulimit -Hc; nice; taskset -cp $$ | sed 's/.*: //'; echo $A,$GPUCR_CAPSULE,$MSG"
    wrapper = (
        f"umask 0027; ulimit -n 100; ulimit -Hc 0; exec nice -n 3 taskset -c 0 {TASK} --socket {up.socket} --job 7 -- "
    )
    task = subprocess.Popen(
        ["sh", "-c", wrapper + '"$@"', "sh", "sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", "A": "b c", "MSG": "old"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/var/tmp",
        user=USER,
        group=USER,
    )
    up.tasks.append(task)
    agent, hello = up.accept()
    assert ("7", "batch", "0", "first", "1") == tuple(
        hello.get(k) for k in ("JOB", "STEP", "RANK", "MODE", "NODECOUNT")
    )
    agent.send(make(Type.START, ("ENV", ["GPUCR_CAPSULE=1", "MSG=x=y"]), SOCKET=up.shepherd, TASK="t"))
    code, out, err, _ = finish(task, agent)
    assert (0, b"") == (code, err)
    assert ["/var/tmp", "0027", "100", "0", "3", "0", "b c,1,x=y"] == out.decode().splitlines()


def test_task_sees_only_stdio(up: Lab) -> None:
    task, agent = up.start("ls", "/proc/self/fd")
    _, out, _, _ = finish(task, agent)
    assert ["0", "1", "2", "3"] == out.decode().split()  # 3 is ls itself


def test_job_cannot_kill_its_relay_by_accident(up: Lab) -> None:
    """kill -TERM -1 inside the job ends the job's processes only."""
    task, agent = up.start("sh", "-c", "trap '' TERM; kill -TERM -1; echo still here")
    code, out, _, _ = finish(task, agent)
    assert (0, b"still here\n") == (code, out)


def test_large_output_of_both_channels(up: Lab) -> None:
    task, agent = up.start("sh", "-c", "head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2; exit 3")
    out, err = b"", b""
    task_out, task_err = task.stdout, task.stderr
    assert task_out and task_err
    out, err = task_out.read(3000000), task_err.read(2000000)
    code, rest, rest_err, _ = finish(task, agent)
    assert (3, 3000000, 2000000, b"", b"") == (code, len(out), len(err), rest, rest_err)


def test_order_of_lines_in_one_file(up: Lab) -> None:
    """stdout and stderr that are the same file share one pipe."""
    path = up.dir / "out"
    path.touch()
    os.chown(path, USER, USER)
    with path.open("ab") as one, path.open("ab") as two:
        loop = "for i in $(seq 500); do echo o$i; echo e$i >&2; done"
        task, agent = up.start("sh", "-c", loop, stdout=one, stderr=two)
        finish(task, agent)
    assert [f"{c}{i}" for i in range(1, 501) for c in "oe"] == path.read_text().split()


def test_stdin_by_pipe(up: Lab) -> None:
    task, agent = up.start("cat", stdin=subprocess.PIPE)
    assert task.stdin
    writer = threading.Thread(target=lambda: (task.stdin.write(b"x" * 300000), task.stdin.close()))
    writer.start()
    assert task.stdout
    out = task.stdout.read(300000)
    writer.join()
    task.stdin = None
    code, rest, _, _ = finish(task, agent)
    assert (0, 300000, b"") == (code, len(out), rest)


def test_signals_after_the_agents_word(up: Lab) -> None:
    """RT and TERM are asked about; others go to the task at once."""
    task, agent = up.start(
        "sh", "-c", "trap 'echo usr1' USR1; trap 'echo term; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    )
    assert task.stdout
    assert b"up\n" == task.stdout.readline()
    task.send_signal(signal.SIGUSR1)
    assert b"usr1\n" == task.stdout.readline()
    task.send_signal(50)
    assert 50 == agent.expect(Type.NOTICE).int("SIGNAL")
    agent.send(make(Type.ABSORB, SIGNAL=50, MSG="checkpoint begins"))
    task.send_signal(signal.SIGTERM)
    assert signal.SIGTERM == agent.expect(Type.NOTICE).int("SIGNAL")
    agent.send(make(Type.FORWARD, SIGNAL=15))
    code, out, err, ended = finish(task, agent)
    assert (4, b"term\n", b"gpucr: checkpoint begins\n", "1") == (code, out, err, ended.get("NOTICE"))


def test_user_signal_is_asked_about(up: Lab) -> None:
    """With --signal 0 every signal may be the preemption notice."""
    task, agent = up.start("sh", "-c", "trap 'exit 9' USR2; echo up; while :; do sleep 0.05; done", signal_number=0)
    assert task.stdout
    task.stdout.readline()
    task.send_signal(signal.SIGUSR2)
    assert signal.SIGUSR2 == agent.expect(Type.NOTICE).int("SIGNAL")
    agent.send(make(Type.FORWARD, SIGNAL=int(signal.SIGUSR2)))
    assert 9 == finish(task, agent)[0]


def test_detach_and_attach(up: Lab) -> None:
    """While detached the task goes on, nothing outward is open, and nothing is lost."""
    task, agent = up.start("sh", "-c", "trap 'exit 5' USR1; echo $$; while :; do sleep 0.02; done")
    assert task.stdout
    pid = int(task.stdout.readline())
    found = up.processes()
    told = up.detach()
    assert [f"batch.0:{pid}:none:running"] == told.all("TASKS")
    # Only the listening socket stays; our own connection goes when the shepherd has seen its end.
    wait_until(lambda: 1 == sum(v.startswith("socket") for v in fds_of(found["gpucr-shepherd"]).values()))
    task.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert "sh" in up.processes(), "a signal waits for the attach"
    up.attach(agent)
    code, out, _, _ = finish(task, agent)
    assert (5, b"") == (code, out)


def test_end_while_detached(up: Lab) -> None:
    """A task that ends while detached: its output and its status come after the attach."""
    task, agent = up.start(
        "sh", "-c", "echo a; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo b; echo c >&2; exit 5"
    )
    assert task.stdout
    assert b"a\n" == task.stdout.readline()
    up.detach()
    Path(f"/proc/{up.init_pid}/root/tmp/go").touch()
    wait_until(lambda: "sh" not in up.processes())
    assert ":exited:1280" in up.detach().get("TASKS")
    up.attach(agent)
    code, out, err, _ = finish(task, agent)
    assert (5, b"b\n", b"c\n") == (code, out, err)


def test_many_detaches_lose_nothing(up: Lab) -> None:
    """Output in the middle of a stream is cut nowhere."""
    task, agent = up.start("sh", "-c", "seq 1 60000")
    assert task.stdout
    data = b""
    for _ in range(20):
        up.detach()
        up.attach(agent)
        time.sleep(0.01)
        os.set_blocking(task.stdout.fileno(), False)
        data += task.stdout.read() or b""
        if data.endswith(b"\n60000\n"):
            break  # it ends now, and its supervisor waits only a while for our answer
    os.set_blocking(task.stdout.fileno(), True)
    code, rest, _, _ = finish_reading(task, agent)
    data += rest
    assert 0 == code
    assert list(range(1, 60001)) == [int(x) for x in data.split()]


def test_stdin_file_goes_on_after_attach(up: Lab) -> None:
    path = up.dir / "in"
    path.write_text("".join(f"{i}\n" for i in range(100000)))
    path.chmod(0o644)
    with path.open("rb") as given:
        task, agent = up.start(
            "sh", "-c", "read a; echo $a; while [ ! -e /tmp/go ]; do sleep 0.02; done; cat | tail -1", stdin=given
        )
        assert task.stdout
        assert b"0\n" == task.stdout.readline()
        up.detach()
        given.seek(0)
        Path(f"/proc/{up.init_pid}/root/tmp/go").touch()
        up.attach(agent)
        code, out, _, _ = finish(task, agent)
    assert (0, b"99999\n") == (code, out)
