"""Ends, restarts, restores and refusals of a capsule, without Slurm and CRIU (root)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from gpucr_hpc.wire import Type, make

from .capsule_lab import INIT, LIMIT_S, TASK, USER, Lab, Peer, alive, fds_of, finish, status_of, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not INIT.exists() or not TASK.exists(), reason="spank_plugin is not built"),
]


def test_pmi_both_ways(up: Lab) -> None:
    ours, theirs = socket.socketpair()
    task, agent = up.start(
        "bash", "-c", "read -N 5 x <&$PMI_FD; printf 'hi %s' $x >&$PMI_FD",
        pass_fds=(theirs.fileno(),), env={"PMI_FD": str(theirs.fileno())},
    )  # fmt: skip
    theirs.close()
    ours.settimeout(LIMIT_S)
    ours.sendall(b"there")
    got = ours.recv(8, socket.MSG_WAITALL)
    assert b"hi there" == got, task.communicate()
    ours.close()
    assert 0 == finish(task, agent)[0]


def test_agent_restart(up: Lab) -> None:
    """The task runs on without the agent; the supervisor comes back with MODE=again and what it still has to ask."""
    task, agent = up.start("sh", "-c", "trap 'exit 4' TERM; echo up; while :; do sleep 0.05; done")
    assert task.stdout
    task.stdout.readline()
    agent.close()
    assert up.listener
    up.listener.close()
    task.send_signal(50)
    time.sleep(0.3)
    up.listen()
    agent, hello = up.accept()
    assert ("again", "1", "50") == (hello.get("MODE"), hello.get("ATTACHED"), hello.get("NOTICE"))
    agent.send(make(Type.OK))
    agent.send(make(Type.ABSORB, SIGNAL=50))
    task.send_signal(signal.SIGTERM)
    assert 15 == agent.expect(Type.NOTICE).int("SIGNAL")
    agent.send(make(Type.FORWARD, SIGNAL=15))
    assert 4 == finish(task, agent)[0]


def test_a_checkpoint_before_the_shepherd_has_heard_of_the_task(up: Lab) -> None:
    """It takes its leave with the request unread; the agent says START again, and nothing has run twice."""
    early = str(up.dir / "early")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(early)
        os.chmod(early, 0o666)
        listener.listen()
        task = up.task("sh", "-c", "echo once; exit 5")
        agent, _hello = up.accept()
        agent.send(make(Type.START, SOCKET=early, TASK="batch.0"))
        leaving = Peer(listener.accept()[0])
        leaving.expect(Type.SPAWN)
        leaving.send(make(Type.DETACHED))
        with pytest.raises(EOFError):
            leaving.receive()
        leaving.close()
    agent.send(make(Type.START, SOCKET=up.shepherd, TASK="batch.0"))
    code, out, _, _ = finish(task, agent)
    assert (5, b"once\n") == (code, out)


def test_start_is_heard_once(up: Lab) -> None:
    task, agent = up.start("sh", "-c", "echo up; read x; exit 6", stdin=subprocess.PIPE)
    assert task.stdout
    assert task.stdin
    task.stdout.readline()
    up.detach()
    agent.send(make(Type.START, SOCKET=up.shepherd, TASK="batch.0"))
    up.attach(agent)
    task.stdin.write(b"\n")
    task.stdin.flush()
    code, out, _, _ = finish(task, agent)
    assert (6, b"") == (code, out)


def test_term_without_agent(up: Lab) -> None:
    """scancel does not depend on the agent."""
    task, agent = up.start("sh", "-c", "echo up; exec sleep 100")
    assert task.stdout
    task.stdout.readline()
    agent.close()
    assert up.listener
    up.listener.close()
    up.socket.unlink()
    begin = time.monotonic()
    task.send_signal(signal.SIGTERM)
    assert -signal.SIGTERM == task.wait(LIMIT_S)
    assert time.monotonic() - begin > 2.5


def test_release(up: Lab) -> None:
    task, agent = up.start("sleep", "100")
    agent.send(make(Type.RELEASE, STATUS=3, MSG="moved"))
    assert (3, b"gpucr: moved\n") == (task.wait(LIMIT_S), task.stderr.read() if task.stderr else b"")


def test_release_after_kill(up: Lab) -> None:
    """The agent kills the capsule first and tells then."""
    task, agent = up.start("sh", "-c", "echo up; exec sleep 100")
    assert task.stdout
    task.stdout.readline()
    up.kill_capsule()
    time.sleep(0.2)
    agent.send(make(Type.RELEASE, STATUS=0))
    assert 0 == task.wait(LIMIT_S)


def test_capsule_death(up: Lab) -> None:
    task, _agent = up.start("sh", "-c", "echo up; exec sleep 100")
    assert task.stdout
    task.stdout.readline()
    up.kill_capsule()
    assert 137 == task.wait(LIMIT_S)
    assert task.stderr
    assert b"gpucr: the capsule of this job died\n" == task.stderr.read()


def test_shepherd_death_ends_the_capsule(up: Lab) -> None:
    os.kill(up.processes()["gpucr-shepherd"], signal.SIGKILL)
    wait_until(lambda: not alive(up.init_pid))
    up.init_pid = 0


def test_daemon_stays_below_the_holder(up: Lab) -> None:
    task, agent = up.start("sh", "-c", "setsid sleep 77 >/dev/null 2>&1 & exit 0")
    assert 0 == finish(task, agent)[0]
    wait_until(lambda: "sleep" in up.processes())
    found = up.processes()
    wait_until(lambda: str(found["gpucr-holder"]) == status_of(found["sleep"])["PPid"])


def test_background_writer_does_not_hold_up_the_end(up: Lab) -> None:
    task, agent = up.start("sh", "-c", "(while :; do echo noise; done) & sleep 0.2; exit 6")
    ended = None
    assert task.stdout
    os.set_blocking(task.stdout.fileno(), False)
    agent.sock.setblocking(False)
    end = time.monotonic() + LIMIT_S
    while ended is None and time.monotonic() < end:
        task.stdout.read(1 << 16)
        try:
            agent.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        agent.sock.settimeout(LIMIT_S)
        ended = agent.expect(Type.ENDED)
    agent.send(make(Type.OK))
    assert 6 == task.wait(LIMIT_S)


def test_reader_gone_is_sigpipe(up: Lab) -> None:
    task, agent = up.start("yes")
    assert task.stdout
    task.stdout.close()
    task.stdout = None
    assert -signal.SIGPIPE == finish(task, agent)[0]


def test_only_root_and_owner_talk_to_the_shepherd(up: Lab) -> None:
    """The owner may not detach; others get nothing."""
    script = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(100)[4])"
    )
    detach = b"GC" + (1).to_bytes(2, "little") + (28).to_bytes(4, "little") + bytes(4)
    run = subprocess.run(
        ["python3", "-c", script, up.shepherd, detach.hex()],
        capture_output=True,
        text=True,
        user=USER,
        group=USER,
        check=True,
    )
    assert Type.FAILED == int(run.stdout)


@pytest.mark.parametrize(
    "junk",
    [b"GC\x02\0" + bytes(8), b"XX" + bytes(10), b"GC\x01\0\x63\0\0\0" + bytes(4), b"GC\x01\0\x14\0\0\0\x03\0\0\0abc"],
)
def test_junk_closes_the_connection_only(up: Lab, junk: bytes) -> None:
    peer = Peer.to(up.shepherd)
    peer.sock.sendall(junk)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.receive()
    peer.close()
    task, agent = up.start("true")
    assert 0 == finish(task, agent)[0]


def test_enter_and_exit_codes(up: Lab) -> None:
    base = [str(INIT), "enter", "--init-pid", str(up.init_pid)]
    assert 7 == subprocess.run([*base, "--plain", "--", "sh", "-c", "exit 7"]).returncode
    assert 128 + 9 == subprocess.run([*base, "--plain", "--", "sh", "-c", "kill -9 $$"]).returncode
    for options, groups in (([], [str(USER)]), (["--groups", "7,65534"], ["7", "65534"])):
        argv = [*base, "--uid", str(USER), "--gid", str(USER), *options, "--", "cat", "/proc/self/status"]
        who = subprocess.run(argv, capture_output=True, text=True).stdout
        status = {k: v.split() for k, _, v in (line.partition(":") for line in who.splitlines())}
        assert [str(USER), "0", "0", "0"] == status["Uid"] == status["Gid"]
        assert groups == status["Groups"]


def test_hook_asks_and_obeys(lab: Lab) -> None:
    hook = subprocess.Popen(
        [INIT, "hook"],
        env={"CRTOOLS_SCRIPT_ACTION": "post-dump", "CRTOOLS_INIT_PID": "5", "GPUCR_HOOK_SOCKET": str(lab.socket)},
    )
    assert lab.listener
    peer = Peer(lab.listener.accept()[0])
    asked = peer.expect(Type.HOOK)
    assert ("post-dump", "5") == (asked.get("ACTION"), asked.get("PID"))
    peer.send(make(Type.HOOKRESULT, STATUS=0))
    lab.peers.append(peer)
    assert 0 == hook.wait(LIMIT_S)
    hook = subprocess.Popen(
        [INIT, "hook"], env={"CRTOOLS_SCRIPT_ACTION": "post-dump", "GPUCR_HOOK_SOCKET": str(lab.socket)}
    )
    peer = Peer(lab.listener.accept()[0])
    peer.expect(Type.HOOK)
    peer.close()
    assert 1 == hook.wait(LIMIT_S)


@pytest.mark.parametrize(("more", "root", "first"), [((), 5001, 5002), (("--holder-pid", "7"), 7, 5001)])
def test_restore_takes_the_tree_over(lab: Lab, more: tuple[str, ...], root: int, first: int) -> None:
    """A pretended CRIU that leaves an orphaned tree behind: holder joins its namespaces and gets its children. Its own
    number is chosen, all others are above the last of the image."""
    ready = lab.capsule(*more, mode="restore", last_pid=5000)
    assert (Type.READY, root) == (ready.type, ready.int("ROOT"))
    assert lab.control
    script = (
        "unshare --uts --ipc sh -c 'hostname restored; echo $$ > /tmp/old;"
        f" setpriv --reuid {USER} --regid {USER} --clear-groups sleep 71 & sleep 72' </dev/null >/dev/null 2>&1 &"
        " while [ ! -s /tmp/old ]; do sleep 0.01; done; echo fine; id -ru; id -u"
    )
    # pids are known beforehand: sh, then unshare/sh
    lab.control.send(
        make(
            Type.RESTORE,
            ("ARG", ["sh", "-pc", script]),
            ("ENV", ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]),
            OLD=first + 1,
            SHEPHERD=0,
        )
    )
    result = lab.control.expect(Type.RESULT)
    assert (0, ["fine", str(USER), "0"]) == (result.int("STATUS"), result.get("MSG").split())
    adopted = lab.control.receive()
    assert (Type.ADOPTED, root) == (adopted.type, adopted.int("ROOT")), adopted
    found = lab.processes()
    holder = found["gpucr-holder"]
    assert [str(USER)] * 4 == status_of(holder)["Uid"].split()
    for space in ("uts", "ipc"):
        assert os.readlink(f"/proc/{found['sleep']}/ns/{space}") == os.readlink(f"/proc/{holder}/ns/{space}")
        assert os.readlink(f"/proc/{lab.init_pid}/ns/{space}") != os.readlink(f"/proc/{holder}/ns/{space}")
    assert str(holder) == status_of(found["sleep"])["PPid"]
    wait_until(lambda: fds_of(holder) == dict.fromkeys(range(3), "/dev/null"))  # it speaks before it closes


def test_restore_failure_is_told(lab: Lab) -> None:
    lab.capsule(mode="restore", last_pid=5000)
    assert lab.control
    lab.control.send(
        make(
            Type.RESTORE,
            ("ARG", ["sh", "-c", "seq 5000; echo no >&2; exit 3"]),
            ("ENV", ["PATH=/usr/bin:/bin"]),
            OLD=50,
        )
    )
    result = lab.control.expect(Type.RESULT)
    assert 3 == os.waitstatus_to_exitcode(result.int("STATUS"))
    assert 4000 == len(result.get("MSG"))
    assert result.get("MSG").endswith("4999\n5000\nno\n")
    with pytest.raises(EOFError):
        lab.control.receive()


# --- without a capsule ---


def test_run_and_refuse(lab: Lab) -> None:
    task = lab.task("sh", "-c", "exit 8", options=("--dir", "/ckpt", "--interval", "30m"))
    agent, hello = lab.accept()
    want = {
        "DIR": "/ckpt",
        "INTERVAL": "30m",
        "SIGNAL": "50",
        "NODES": "n[1-2]",
        "NODE": "n1",
        "RESTART": "0",
        "NOTICE": "0",
    }
    assert want == {k: hello.get(k) for k in want}
    agent.send(make(Type.RUN, MSG="not today"))
    assert 8 == task.wait(LIMIT_S)
    assert task.stderr
    assert b"gpucr: not today\n" == task.stderr.read()
    task = lab.task("true")
    agent, _ = lab.accept()
    agent.send(make(Type.REFUSE, STATUS=44, MSG="no"))
    assert 44 == task.wait(LIMIT_S)


def test_no_agent(lab: Lab) -> None:
    """Policy run begins unprotected after 5 s with the signal mask as given, policy fail does not."""
    assert lab.listener
    lab.listener.close()
    lab.socket.unlink()
    run = lab.task("sh", "-c", "grep SigBlk /proc/self/status; exit 2")
    fail = lab.task("true", options=("--when-unprotected", "fail"))
    restore = lab.task("echo", "begun", options=("--option", "restore=20261127T232501Z-3f9a"))
    out, err = run.communicate(timeout=LIMIT_S)
    assert (2, b"SigBlk:\t0000000000000000\n") == (run.returncode, out)
    assert err.startswith(b"gpucr: agent not reachable at /run/") and err.endswith(
        b"this job runs without protection\n"
    )
    assert 1 == fail.wait(LIMIT_S)
    out, err = restore.communicate(timeout=LIMIT_S)
    assert (1, b"") == (restore.returncode, out)
    assert err.endswith(b"nothing is restored without it\n")


def test_restarted_job_waits_for_the_agent(lab: Lab) -> None:
    assert lab.listener
    lab.listener.close()
    task = lab.task("true", env={"SLURM_RESTART_COUNT": "1"})
    time.sleep(6)
    assert task.poll() is None
    lab.listen()
    agent, hello = lab.accept()
    assert "1" == hello.get("RESTART")
    agent.send(make(Type.REFUSE, STATUS=1))
    assert 1 == task.wait(LIMIT_S)
