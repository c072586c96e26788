"""Failures that people reported (cases C3 to C40), each as a short job that is moved, beside an undisturbed run.

Good is an identical result, or a refusal before anything is frozen with pid, object and reason, the job running on.
"""

from __future__ import annotations

import os

import pytest
from case_programs import WHOLE
from jobs import Bench, bench, each, take
from refused_programs import REFUSED

from gpucr_hpc.lab import conf
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until


def command(on: Bench, name: str, language: str, text: str) -> str:
    if language == "c":
        return on.compile(name, text)
    return f"python3 {on.put(name + '.py', text)}"


# Each program runs twice at once, and a move needs room: three programs take six of the lab's eight processors.
GROUPS = [list(WHOLE)[n : n + 3] for n in range(0, len(WHOLE), 3)]


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_the_result_is_that_of_an_undisturbed_run(lab: Lab, names: list[str]) -> None:
    """Each program sets a state, says ready, and checks it after the move: same output, same exit status."""
    on = bench(lab, "cases-whole")
    moved, plain = {}, {}
    for name in names:
        program = command(on, name, *WHOLE[name])
        moved[name] = on.submit(f"exec {program} moved-{name}", "--mem=200M", name=f"moved-{name}")
        plain[name] = on.submit(f"exec {program} moved-{name}", "--mem=200M", name=f"plain-{name}", protected=False)
    for job in moved.values():
        job.says("ready\n")
    for job in plain.values():
        job.says("ready\n")
    each([lambda job=job: job.move() for job in moved.values()])
    (on.directory / "go").touch()
    for name, job in moved.items():
        job.end()
        plain[name].end()
        assert (name, job.out) == (name, plain[name].out)
        assert "ok\n" in job.out


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_touched(lab: Lab, name: str) -> None:
    """The refusal names the process and the object; the job goes on, and can be checkpointed when it is gone."""
    language, text, reason = REFUSED[name]
    on = bench(lab, f"cases-{name}")
    job = on.submit(f"exec {command(on, name, language, text)} x", name="job").says("ready\n")
    asked = job.gpucr("checkpoint", str(job.id), check=False)
    assert asked.status == 44, asked.stderr
    assert "(pid " in asked.stderr
    assert reason in asked.stderr
    assert reason in job.raw
    assert not job.sets()
    (on.directory / "gone").touch()
    job.says("let go\n").move()
    (on.directory / "go").touch()
    assert job.end().out == "ready\nlet go\nok\n"


# A client waits for a server that does not accept it: CRIU cannot save that, and no preflight sees it.
_NOT_ACCEPTED = """
import os, socket, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.05)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
print("ready", flush=True)
wait("gone")
accepted = server.accept()[0]
client.sendall(b"hello")
print("let go", flush=True)
wait("go")
assert accepted.recv(5, socket.MSG_WAITALL) == b"hello"
print("ok")
"""
LETS_GO = {"refused": REFUSED["io-uring"][:2], "not dumped": ("python", _NOT_ACCEPTED)}


@pytest.mark.parametrize("name", LETS_GO)
def test_what_the_job_lets_go_of_in_the_grace_time(lab: Lab, name: str) -> None:
    """Slurm tells a preemption once, and ends what is not saved: it is tried again. The user reads of it once."""
    on = bench(lab, f"cases-{name.split()[0]}-in-grace-time")
    job = on.submit(f"exec {command(on, 'program', *LETS_GO[name])} x", name="job").says("ready\n")
    high = take(lab, job.node)
    try:
        job.says("gpucr: checkpoint not possible, the job runs on: ")
        (on.directory / "gone").touch()
        job.says("let go\n").back(1)
        (on.directory / "go").touch()
        assert job.end().out == "ready\nlet go\nok\n"
        assert job.raw.count("checkpoint not possible") == 1
    finally:
        lab.exec("ctl", ["scancel", str(high)])


_TERMINALS = """
import os, pty, time
def line(fd):  # a terminal hands a line on in as many parts as it likes
    got = b""
    while not got.endswith(b"\\n"):
        got += os.read(fd, 100)
    return got
count, kept = {count}, {kept}
pairs = [pty.openpty() for _ in range(count)]
for master, slave in pairs[kept:-1]:
    os.close(master), os.close(slave)
pairs = pairs[:kept] + pairs[-1:]
print("ready", os.ttyname(pairs[-1][1]), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
for number, (master, slave) in enumerate(pairs):
    os.write(slave, b"line %d\\n" % number)
    assert line(master) == b"line %d\\r\\n" % number and os.isatty(slave)
print(os.ttyname(pairs[-1][1]))
"""


@pytest.mark.parametrize(("count", "kept"), [(20, 0), (70, 69)], ids=["a number above free ones", "many"])
def test_terminals_are_the_jobs_own(lab: Lab, count: int, kept: int) -> None:
    """Whatever numbers are taken on the nodes: a terminal comes back with its own. Open MPI makes one for each local
    rank."""
    on = bench(lab, f"cases-terminals-{count}")
    held = on.put("held.py", "import pty, time\npairs = [pty.openpty() for _ in range(60)]\ntime.sleep(600)\n")
    program = on.put("terminals.py", _TERMINALS.format(count=count, kept=kept))
    nodes = lab.nodes()[1:]
    for node in nodes:
        lab.exec(node, ["sh", "-c", f"python3 {held} >/dev/null 2>&1 & echo $! >/tmp/held"])
    try:
        job = on.submit(f"exec python3 {program}", name="job").says(f"ready /dev/pts/{count - 1}\n")
        job.move()
        (on.directory / "go").touch()
        assert job.end().out.splitlines()[1] == f"/dev/pts/{count - 1}"
    finally:
        for node in nodes:
            lab.exec(node, ["sh", "-c", "kill $(cat /tmp/held); rm /tmp/held"], check=False)


def test_a_terminal_that_criu_cannot_make_is_refused(lab: Lab) -> None:
    """Before anything is frozen: 39 others were there before it, and have gone."""
    on = bench(lab, "cases-terminal")
    program = on.put("terminals.py", _TERMINALS.format(count=40, kept=0))
    job = on.submit(f"exec python3 {program}", name="job").says("ready /dev/pts/39\n")
    asked = job.gpucr("checkpoint", str(job.id), check=False)
    assert (asked.status, "/dev/pts/39" in asked.stderr) == (44, True)
    (on.directory / "go").touch()
    job.end()


def test_what_cannot_be_saved_is_said_while_there_is_time(lab: Lab) -> None:
    """Nobody has asked for a checkpoint; a job of which all can be saved hears nothing."""
    on = bench(lab, "cases-outlook")
    language, text, reason = REFUSED["io-uring"]
    job = on.submit(f"exec {command(on, 'ring', language, text)} x", name="job")
    plain = on.submit("until [ -e go ]; do sleep 0.1; done", name="plain")
    job.says("as it is, this job can NOT be checkpointed: ")
    assert reason in job.raw
    (on.directory / "gone").touch()
    job.says("let go\n").move()
    (on.directory / "go").touch()
    assert job.end().out == "ready\nlet go\nok\n"
    plain.end()
    assert plain.raw == ""


_RING = """
import ctypes, errno, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def ring():
    found = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    return errno.errorcode[ctypes.get_errno()] if found < 0 else "a ring"

def wait(name):
    while not os.path.exists(name):
        time.sleep(0.05)

seen = []
thread = threading.Thread(target=lambda: (wait("go"), seen.append(ring())))
thread.start()
print("at first", ring(), flush=True)
wait("go")
thread.join()
status = open("/proc/self/status").read()
print("then", ring(), *seen, "no new privileges", status.partition("NoNewPrivs:")[2].split()[0])
"""


def test_a_job_without_io_uring_finds_none_and_moves(lab: Lab) -> None:
    """--checkpoint-io-uring=hide: script and steps on two nodes, threads, and steps that start after moves; programs
    may still gain rights by their set-user-id bit."""
    on = bench(lab, "cases-hide")
    ring = f"python3 {on.put('ring.py', _RING)}"
    script = f"{ring} & srun {ring} & wait; srun {ring}"
    job = on.submit(script, "--nodes=2", "--ntasks-per-node=1", "--checkpoint-io-uring=hide", name="job")
    wait_until(lambda: job.out.count("at first ENOSYS\n") == 3, 60, lambda: f"three programs:\n{job.raw}")
    job.move()
    job.checkpoint()
    job.move()
    (on.directory / "go").touch()
    job.end()
    assert sorted(job.out.splitlines()) == 5 * ["at first ENOSYS"] + 5 * ["then ENOSYS ENOSYS no new privileges 0"]


def test_a_tracer_outside_is_named(lab: Lab) -> None:
    """C22: strace on a task."""
    on = bench(lab, "cases-tracer")
    job = on.submit("echo ready; until [ -e go ]; do sleep 0.1; done; echo end", name="job").says("ready\n")
    node, traced = job.node, f"job{job.id:05d}/[s]lurm_script"
    script = f"strace -o /dev/null -p $(pgrep -f -n '{traced}') & echo $! > /tmp/tracer"
    lab.exec(node, ["sh", "-c", f"({script}) >/dev/null 2>&1"])
    status = f"grep -h TracerPid /proc/$(pgrep -f -n '{traced}')/status"
    wait_until(lambda: lab.exec(node, ["sh", "-c", status], check=False).stdout.split()[-1:] != ["0"], 10, "strace")
    asked = job.gpucr("checkpoint", str(job.id), check=False)
    assert asked.status == 44
    assert "is traced by pid" in asked.stderr
    lab.exec(node, ["sh", "-c", "kill $(cat /tmp/tracer); rm /tmp/tracer"])
    wait_until(lambda: job.gpucr("checkpoint", str(job.id), check=False).status == 0, 20, "a checkpoint")
    (on.directory / "go").touch()
    assert job.end().out == "ready\nend\n"


def test_a_replaced_library_is_named(lab: Lab) -> None:
    """C3: a file that the job has mapped is another one when the job comes back: held, and the file is named; with
    the old file it goes on."""
    on = bench(lab, "cases-library")
    library = on.compile("lib.so", "int answer(void) { return 42; }", "-shared", "-fPIC")
    host = on.directory / "lib.so"
    script = f"""
        import ctypes, os, time
        lib = ctypes.CDLL({library!r})
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.1)
        print("answer", lib.answer())
    """
    job = on.submit(f"exec python3 {on.put('use.py', script)}", name="job").says("ready\n")
    lab.exec("ctl", ["scontrol", "hold", str(job.id)])
    job.checkpoint("--requeue")
    lab.wait_job(job.id, "PENDING")
    old = host.read_bytes()
    host.write_bytes(old + b"longer")
    lab.exec("ctl", ["scontrol", "release", str(job.id)])
    job.says("The job is held with its checkpoints kept")
    assert "lib.so" in job.raw
    host.write_bytes(old)
    wait_until(lambda: job.info["job_state"] == ["PENDING"], 60, "the job to be held")
    (on.directory / "go").touch()
    lab.exec("ctl", ["scontrol", "release", str(job.id)])
    assert job.end().out == "ready\nanswer 42\n"


def test_many_threads_and_a_fork_storm(lab: Lab) -> None:
    """C24: 20 checkpoints of 500 threads beside processes that fork all the time; the job runs on."""
    on = bench(lab, "cases-storm")
    storm = """
        import os, threading, time
        def wait():
            while not os.path.exists("go"):
                time.sleep(0.5)
        threads = [threading.Thread(target=wait) for _ in range(500)]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        n = 0
        while not os.path.exists("go"):
            pid = os.fork()
            if pid == 0:
                os._exit(n % 100)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == n % 100
            n += 1
        for thread in threads:
            thread.join()
        print("ok")
    """
    job = on.submit(f"exec python3 -W ignore {on.put('storm.py', storm)}", name="job").says("ready\n")
    for _ in range(20):
        job.checkpoint()
    (on.directory / "go").touch()
    assert job.end().out == "ready\nok\n"


def test_a_service_outside_is_reconnected(lab: Lab) -> None:
    """C33: a connection out of the job does not come along; the client sees its end and connects again."""
    on = bench(lab, "cases-service")
    server = """
        import socket
        listener = socket.create_server(("0.0.0.0", 7777))
        while True:
            client, _ = listener.accept()
            client.sendall(b"hello\\n")
    """
    client = f"""
        import os, socket, time
        def connect():
            sock = socket.create_connection(("{conf.address("ctl")}", 7777), timeout=10)
            assert sock.recv(100) == b"hello\\n"
            return sock
        sock = connect()
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.1)
        sock.settimeout(5)
        try:
            gone = sock.sendall(b"still there?") or sock.recv(100) == b""
        except OSError:
            gone = True
        connect()
        print("gone", gone)
    """
    path = on.put("server.py", server)
    lab.exec("ctl", ["sh", "-c", f"python3 {path} >/dev/null 2>&1 & echo $! > /tmp/server"])
    try:
        job = on.submit(f"exec python3 {on.put('client.py', client)}", name="job")
        job.says("ready\n").move()
        (on.directory / "go").touch()
        assert job.end().out == "ready\ngone True\n"
    finally:
        lab.exec("ctl", ["sh", "-c", "kill $(cat /tmp/server); rm /tmp/server"])


def test_limits_and_groups_hold_after_a_move(lab: Lab) -> None:
    """C30: every process is in its new step's control groups, its memory limit holds, and Slurm sees its end."""
    on = bench(lab, "cases-limits")
    eat = """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.1)
        block = bytearray(500 << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
        print("not limited", flush=True)
    """
    script = f"sleep 300 & exec python3 {on.put('eat.py', eat)}"
    job = on.submit(script, "--mem=200M", name="eat").says("ready\n").move()
    node, run = job.node, job.info
    ours = [p for p in lab.pids(node) if _pid_namespace(p) not in (_pid_namespace(lab.pid(node) or 0), "")]
    assert len(ours) >= 4
    for pid in ours:
        with open(f"/proc/{pid}/cgroup") as file:
            text = file.read()
        assert f"slurm_{node}" in text or "slurmstepd.scope" in text, text
    assert run["job_state"] == ["RUNNING"]
    (on.directory / "go").touch()
    wait_until(lambda: job.over, 60, "the end")
    assert job.info["job_state"] == ["OUT_OF_MEMORY"]
    assert "not limited" not in job.out


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
