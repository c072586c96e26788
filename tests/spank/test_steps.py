"""Proxy, shepherd and supervisors of a step together, in a capsule, without Slurm and CRIU (root)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr_hpc.wire import Type, make

from .capsule_lab import INIT, LIMIT_S, TASK, Lab, finish, finish_reading
from .step_lab import StepLab, built, next_step

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not built() or not TASK.exists(), reason="spank_plugin is not built"),
]


@pytest.fixture
def steps() -> Iterator[StepLab]:
    with StepLab() as made:
        assert Type.READY == made.capsule().type
        yield made


def test_a_step_of_two_tasks(steps: StepLab) -> None:
    """Arguments and environment go out, output comes back with labels, the script sees srun's exit status."""
    script, batch = steps.script("X=1 srun sh -c 'echo out $RANK; echo err >&2; exit $RANK'; echo srun $?")
    steps.take_control()
    step = next_step(steps)
    assert ["sh", "-c", "echo out $RANK; echo err >&2; exit $RANK"] == step.srun.all("ARG")
    assert "X=1" in step.srun.all("ENV")
    assert "/" == step.srun.get("CWD")
    step.plan(2, label=1)
    hello = [step.task(r) for r in range(2)]
    assert [(step.key, str(r), "3", "first") for r in range(2)] == [
        (h.get("STEP"), h.get("RANK"), h.get("NODEID"), h.get("MODE")) for h in hello
    ]
    assert [0, 1] == [step.ended(r) for r in range(2)]
    step.say(Type.SRUNEND, STATUS=1 << 8)
    code, out, err, _ = finish(script, batch)
    assert (0, [b"0: out 0", b"1: out 1", b"srun 1"], b"0: err\n1: err\n") == (
        code, sorted(out.splitlines()), b"".join(sorted(err.splitlines(keepends=True))),
    )  # fmt: skip


def test_nothing_of_the_step_passes_slurm(steps: StepLab) -> None:
    """Input and output go between script and task; what slurmstepd gave stays silent."""
    script, batch = steps.script("seq 1 200000 | srun cat | md5sum")
    steps.take_control()
    step = next_step(steps)
    step.plan(1)
    step.task(0, stdin=subprocess.PIPE)
    assert 0 == step.ended(0)
    task, _ = step.supervisors[0]
    assert (b"", b"") == (task.stdout.read() if task.stdout else b"", task.stderr.read() if task.stderr else b"")
    step.say(Type.SRUNEND, STATUS=0)
    want = subprocess.run("seq 1 200000 | md5sum", shell=True, capture_output=True).stdout
    assert (0, want) == finish(script, batch)[:2]


def test_detaches_in_the_middle_of_streams(steps: StepLab) -> None:
    """Twenty times everything that leads out is closed, while two tasks stream input and output; not a byte is lost."""
    slow = "for i in $(seq 40); do dd bs=10000 count=5 iflag=fullblock status=none; sleep 0.03; done; cat; seq 1 1000"
    script, batch = steps.script(f"seq 1 400000 | srun sh -c '{slow}'")
    steps.take_control()
    step = next_step(steps)
    step.plan(2, label=1)
    for r in range(2):
        step.task(r, stdin=subprocess.PIPE)
    parts: list[bytes] = []
    assert script.stdout
    stream = script.stdout
    os.set_blocking(stream.fileno(), False)
    for _ in range(20):
        tasks = steps.detach_all()
        assert 3 == len(tasks)
        assert len(os.listdir(f"/proc/{steps.processes()['gpucr-shepherd']}/fd")) < 30
        steps.take_control(step.key)
        steps.attach(batch)
        for r in range(2):
            step.attach(r)
        time.sleep(0.02)
        parts.append(stream.read() or b"")
    os.set_blocking(stream.fileno(), True)
    ends = [threading.Thread(target=step.ended, args=(r,)) for r in range(2)]
    ends.append(threading.Thread(target=lambda: ([t.join() for t in ends[:2]], step.say(Type.SRUNEND, STATUS=0))))
    for t in ends:
        t.start()
    code, rest, _, _ = finish_reading(script, batch)
    for t in ends:
        t.join()
    lines = (b"".join(parts) + rest).decode().splitlines()
    assert 0 == code
    for r in range(2):
        assert [*range(1, 400001), *range(1, 1001)] == [int(x[3:]) for x in lines if x.startswith(f"{r}: ")]
    assert 2 * 401000 == len(lines)


def test_signals_and_death_of_srun(steps: StepLab) -> None:
    """A signal to the proxy is told; when it is killed, srun shall be killed."""
    script, batch = steps.script(
        "srun x & q=$!; trap 'kill -TERM $!; wait $!; echo $?' USR1; srun y & wait; kill -9 $q; wait; echo end"
    )
    control = steps.take_control()
    keys = {f.get("ARG"): f.get("KEY") for f in (control.expect(Type.SRUN), control.expect(Type.SRUN))}
    script.send_signal(signal.SIGUSR1)
    told = control.expect(Type.SRUNSIGNAL)
    assert told.get("KEY") in keys.values()
    assert 15 == told.int("SIGNAL")
    control.send(make(Type.SRUNEND, KEY=told.get("KEY"), STATUS=143 << 8))
    others = set(keys.values()) - {told.get("KEY")}
    told = control.expect(Type.SRUNSIGNAL)
    assert (others, 9) == ({told.get("KEY")}, told.int("SIGNAL"))
    code, out, _, _ = finish(script, batch)
    assert (0, b"143\nend\n") == (code, out)


def test_held_until_placed(steps: StepLab) -> None:
    """Without the agent's word a step's task does not run; an agent that comes again is asked again."""
    script, batch = steps.script("srun touch /tmp/ran; echo $?")
    steps.take_control()
    step = next_step(steps)
    step.plan(1)
    _, agent, _ = step._supervisor(0, env={"PATH": "/usr/bin:/bin"})
    agent.send(
        make(
            Type.START,
            SOCKET=steps.shepherd,
            TASK="s.0",
            STDIO=f"127.0.0.1:{step.srun.get('PORT')}",
            TOKEN=step.srun.get("TOKEN"),
        )
    )
    place = agent.expect(Type.PLACE)
    pid = place.int("PID")
    agent.close()
    again, hello = steps.accept()
    assert ("again", "0") == (hello.get("MODE"), hello.get("ATTACHED"))
    assert pid == again.expect(Type.PLACE).int("PID")
    assert not Path(f"/proc/{steps.init_pid}/root/tmp/ran").exists()
    # a checkpoint in this moment: the task is still held afterwards, and asked for again
    assert any(t.startswith("s.0:") for t in steps.detach_all())
    steps.take_control(step.key)
    steps.attach(batch)
    again.send(make(Type.ATTACH, SOCKET=steps.shepherd, TASK="s.0", RESTORED=0))
    assert pid == again.expect(Type.PLACE).int("PID")
    assert not Path(f"/proc/{steps.init_pid}/root/tmp/ran").exists()
    again.send(make(Type.PLACED, TASK="s.0"))
    step.supervisors[0] = step.supervisors[0][0], again
    assert 0 == step.ended(0)
    assert Path(f"/proc/{steps.init_pid}/root/tmp/ran").exists()
    step.say(Type.SRUNEND, STATUS=0)
    assert b"0\n" == finish(script, batch)[1]


def test_a_proxy_that_nobody_answers_for(steps: StepLab) -> None:
    """STDIO that cannot be reached fails the task with a reason."""
    steps.take_control()
    task = steps.task("true", options=("--step", "0123456789abcdef"))
    agent, _ = steps.accept()
    agent.send(make(Type.START, SOCKET=steps.shepherd, TASK="x.0", STDIO="127.0.0.1:1", TOKEN="0" * 32))
    assert 126 << 8 == agent.expect(Type.ENDED).int("STATUS")
    agent.send(make(Type.OK))
    assert 126 == task.wait(LIMIT_S)
    assert task.stderr
    assert b"reach the step's srun: Connection refused" in task.stderr.read()


def test_pmi_fd_is_closed_with_the_task(steps: StepLab) -> None:
    """slurmstepd sees the end of its PMI socket although the supervisor still waits for the agent's OK."""
    ours, theirs = socket.socketpair()
    script, batch = steps.script("srun bash -c 'printf \"cmd=init pmi_version=1 pmi_subversion=1\\n\" >&$PMI_FD'")
    steps.take_control()
    step = next_step(steps)
    step.plan(1)
    step.task(0, pass_fds=(theirs.fileno(),), env={"PATH": "/usr/bin:/bin", "PMI_FD": str(theirs.fileno())})
    theirs.close()
    ours.settimeout(LIMIT_S)
    data = b""
    while part := ours.recv(100):
        data += part
    assert b"cmd=init pmi_version=1 pmi_subversion=1\n" == data
    ours.close()
    assert 0 == step.ended(0)
    step.say(Type.SRUNEND, STATUS=0)
    assert 0 == finish(script, batch)[0]


def test_cookie_and_bind(lab: Lab) -> None:
    """HELLO carries the cookie; --bind covers a file through a link."""
    (lab.dir / "mine").write_text("mine\n")
    (lab.dir / "real").write_text("real\n")
    (lab.dir / "link").symlink_to("real")
    assert Type.READY == lab.capsule("--bind", f"{lab.dir}/mine:{lab.dir}/link").type
    task = lab.task("cat", f"{lab.dir}/real", env={"SLURM_SPANK_GPUCR_COOKIE": "c" * 32})
    agent, hello = lab.accept()
    assert ("c" * 32, "0") == (hello.get("COOKIE"), hello.get("NODEID"))
    agent.send(make(Type.START, SOCKET=lab.shepherd, TASK="batch.0"))
    assert (0, b"mine\n") == finish(task, agent)[:2]
    assert "real\n" == (lab.dir / "link").read_text()


def test_cover(lab: Lab) -> None:
    """Below a covered directory there is only what is bound, files and directories, their sources among them."""
    site, user = lab.dir / "site", lab.dir / "user"
    (site / "7").mkdir(parents=True)
    (site / "7/file").write_text("seven\n")
    (site / "other").mkdir()
    binds = [f"{site}/7:{site}/7", f"{user}:{site}/4/user", f"{site}/7/file:{site}/4/spool/script"]
    asked = [word for bind in binds for word in ("--bind", bind)]
    assert Type.READY == lab.capsule("--cover", str(site), *asked).type
    (user / "there").touch()
    task, agent = lab.start("sh", "-c", f"cd {site}; find . | sort; cat 4/spool/script; touch x 4/x 2>&1 | wc -l")
    lines = finish(task, agent)[1].decode().split()
    seen = [".", "./4", "./4/spool", "./4/spool/script", "./4/user", "./4/user/shepherd.sock", "./4/user/there"]
    assert [*seen, "./7", "./7/file", "seven", "2"] == lines
    assert ["7", "other"] == sorted(path.name for path in site.iterdir())


def test_cover_that_is_not_there_is_named(lab: Lab) -> None:
    failed = lab.capsule("--cover", "/no/such/directory")
    assert "/no/such/directory: No such file or directory" in failed.get("MSG")


def test_bind_that_fails_is_named(lab: Lab) -> None:
    failed = lab.capsule("--bind", "/dev/null:/no/such/file")
    assert Type.FAILED == failed.type
    assert "/no/such/file: No such file or directory" in failed.get("MSG")


# --- gpucr-init run ---


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7 << 8), ("kill -9 $$", 9), ("true", 0)])
def test_run_leaves_the_status(tmp_path: Path, command: str, status: int) -> None:
    file = tmp_path / "status"
    run = subprocess.run([INIT, "run", "--status", file, "--", "sh", "-c", f"echo hi; {command}"], capture_output=True)
    assert (str(status), b"hi\n") == (file.read_text(), run.stdout)
    assert (status >> 8 or (128 + status if status else 0)) == run.returncode
    assert [file] == list(tmp_path.iterdir())


def test_run_passes_signals_on(tmp_path: Path) -> None:
    """Each of them, to the child alone; the starter's blocked signals are not the child's."""
    file = tmp_path / "status"
    script = (
        "for s in TERM INT USR1 USR2 HUP QUIT ALRM; do trap \"echo $s\" $s; done; trap 'echo CONT; exit 5' CONT;"
        " echo up; while :; do sleep 0.02; done"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        run = subprocess.Popen([INIT, "run", "--status", file, "--", "bash", "-c", script], stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert run.stdout
    assert b"up\n" == run.stdout.readline()
    for name in ("TERM", "INT", "USR1", "USR2", "HUP", "QUIT", "ALRM", "CONT"):
        run.send_signal(getattr(signal, f"SIG{name}"))
        assert f"{name}\n".encode() == run.stdout.readline()
    assert 5 == run.wait(LIMIT_S)
    run.stdout.close()
    assert str(5 << 8) == file.read_text()


def test_run_of_nothing(tmp_path: Path) -> None:
    run = subprocess.run([INIT, "run", "--status", tmp_path / "s", "--", "/no/such"], capture_output=True)
    assert (127, str(127 << 8)) == (run.returncode, (tmp_path / "s").read_text())
