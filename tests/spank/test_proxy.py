"""gpucr-srun against a pretended shepherd and pretended tasks."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from gpucr_hpc.wire import Type

from .capsule_lab import LIMIT_S, wait_until
from .proxy_lab import PROXY, ProxyLab, piece

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="spank_plugin is not built")


@pytest.fixture
def lab() -> Iterator[ProxyLab]:
    with ProxyLab() as made:
        yield made


def test_request(lab: ProxyLab) -> None:
    """What srun would need is told: arguments, surroundings, a key, a token and a port."""
    srun = lab.start("-n", "2", "--label", "a=b", "", env={"X": "y=z"})
    assert re.fullmatch("[0-9a-f]{16}", srun.get("KEY"))
    assert re.fullmatch("[0-9a-f]{32}", srun.get("TOKEN"))
    assert ["-n", "2", "--label", "a=b", ""] == srun.all("ARG")
    assert "X=y=z" in srun.all("ENV")
    assert (str(lab.dir), os.umask(0o22)) == (srun.get("CWD"), int(srun.get("UMASK"), 8))
    assert 0 < srun.int("PORT") < 65536
    assert 16 == len(srun.all("RLIMIT"))
    lab.end(7 << 8)
    assert (7, b"", b"") == lab.finish()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1 << 8, 1), (143 << 8, 143), (9, 137)])
def test_exit_status(lab: ProxyLab, status: int, code: int) -> None:
    lab.start("true")
    lab.end(status)
    assert code == lab.finish()[0]


def test_output_of_tasks_and_of_srun(lab: ProxyLab) -> None:
    """Own descriptors, unlabelled; a NUL byte stands between two DATA."""
    lab.start("x")
    lab.plan(1)
    task = lab.task(0)
    task.out(b"no newline")
    task.err(b"err\0\xff\n")
    task.end()
    assert task.closed_by_proxy()
    lab.say(Type.OUTPUT, ("DATA", ["a\n", "b"]), FD=1)
    lab.say(Type.OUTPUT, FD=2, DATA="srun: error: x\n")
    lab.end()
    assert (0, b"no newlinea\n\0b", b"err\0\xff\nsrun: error: x\n") == lab.finish()


def test_data_before_the_plan_waits(lab: ProxyLab) -> None:
    """The connection is taken at once (CRIU cannot dump it otherwise), its data when the plan is there."""
    lab.start("x")
    before = lab.fd_count()
    task = lab.task(1)
    task.out(b"one\n")
    wait_until(lambda: lab.fd_count() == before + 1)
    time.sleep(0.1)
    out = lab.run.stdout
    assert out
    os.set_blocking(out.fileno(), False)
    assert out.read() is None
    os.set_blocking(out.fileno(), True)
    lab.plan(12, label=1)
    assert b" 1: one\n" == out.readline()
    task.end()
    lab.end()
    assert 0 == lab.finish()[0]


def test_labels(lab: ProxyLab) -> None:
    """Whole lines, label as wide as the largest rank; an unfinished line ends with the task; long ones are cut."""
    lab.start("x")
    lab.plan(11, label=1)
    a, b = lab.task(0), lab.task(10)
    a.out(b"he")
    b.out(b"B1\nB2\nB")
    time.sleep(0.05)
    a.out(b"llo\n\nrest")
    b.out(b"3\n")
    a.end()
    for _ in range(4):
        b.out(b"z" * 50000)
    b.out(b"\n")
    b.end()
    lab.end()
    code, out, _ = lab.finish()
    lines = out.split(b"\n")
    assert 0 == code
    assert [b" 0: hello", b" 0: ", b" 0: rest"] == [x for x in lines if x.startswith(b" 0")]
    ten = [x[4:] for x in lines if x.startswith(b"10: ")]
    assert [b"B1", b"B2", b"B3"] == ten[:3]
    assert b"z" * 200000 == b"".join(ten[3:])
    assert max(map(len, ten)) <= 2 * 65536
    assert len(lines) == 3 + len(ten) + 1


def test_labels_with_random_pieces(lab: ProxyLab) -> None:
    rng = random.Random(7)
    wanted = {r: [f"line {i} of {r} " + "x" * rng.randrange(300) for i in range(400)] for r in range(3)}
    lab.start("x")
    lab.plan(3, label=1)

    def feed(rank: int) -> None:
        rng, task = random.Random(rank), lab.task(rank)
        data = "".join(x + "\n" for x in wanted[rank]).encode()
        while data:
            n = rng.randrange(1, 900)
            task.out(data[:n])
            data = data[n:]
        task.end()

    threads = [threading.Thread(target=feed, args=(r,)) for r in wanted]
    for t in threads:
        t.start()
    reader = threading.Thread(target=lambda: (time.sleep(0.1), [t.join() for t in threads], lab.end()))
    reader.start()
    code, out, _ = lab.finish()
    reader.join()
    assert 0 == code
    for rank in wanted:
        assert wanted[rank] == [x[3:] for x in out.decode().splitlines() if x.startswith(f"{rank}: ")]


@pytest.mark.parametrize("late", [False, True])
def test_input_reaches_every_task(lab: ProxyLab, late: bool) -> None:
    """No byte is read before all tasks are there; then all of them get all of it."""
    data = random.Random(1).randbytes(500000)
    lab.start("x", stdin=subprocess.PIPE)
    stdin, lab.run.stdin = lab.run.stdin, None
    assert stdin
    writer = threading.Thread(target=lambda: (stdin.write(data), stdin.close()))
    writer.start()
    tasks = [lab.task(0)] if late else []
    lab.plan(3, stdin="all")
    if late:
        time.sleep(0.1)
    tasks += [lab.task(r) for r in range(len(tasks), 3)]
    got: dict[int, bytes] = {}
    readers = [threading.Thread(target=lambda i=i: got.update({i: tasks[i].all_input()})) for i in range(3)]
    for t in readers:
        t.start()
    for t in [*readers, writer]:
        t.join(LIMIT_S)
    assert {0: data, 1: data, 2: data} == got
    for t in tasks:
        t.end()
    lab.end()
    assert (0, b"", b"") == lab.finish()


def test_a_slow_task_holds_input_back(lab: ProxyLab) -> None:
    """At most a bounded amount is read ahead of the slowest task; when it leaves, the others go on."""
    lab.start("x", stdin=subprocess.PIPE)
    stdin, lab.run.stdin = lab.run.stdin, None
    assert stdin
    os.set_blocking(stdin.fileno(), False)
    lab.plan(2, stdin="all")
    fast, slow = lab.task(0), lab.task(1)
    sent, got = 0, [0]

    def drain() -> None:
        while part := fast.input():
            got[0] += len(part)

    reader = threading.Thread(target=drain)
    reader.start()
    end = time.monotonic() + LIMIT_S
    stuck = 0
    while stuck < 20 and time.monotonic() < end:
        try:
            sent += os.write(stdin.fileno(), b"x" * 65536)
            stuck = 0
        except BlockingIOError:
            stuck += 1
            time.sleep(0.02)
    assert stuck == 20, "everything was read although one task takes nothing"
    assert sent < 16 << 20  # kernel buffers and the ring
    slow.close()
    os.set_blocking(stdin.fileno(), True)
    os.write(stdin.fileno(), b"x" * 65536)
    stdin.close()
    reader.join(LIMIT_S)
    assert sent + 65536 == got[0]
    fast.end()
    lab.end()
    assert 0 == lab.finish()[0]


def test_input_of_one_rank_and_of_none(lab: ProxyLab) -> None:
    (lab.dir / "in").write_bytes(b"data\n")
    with (lab.dir / "in").open("rb") as stdin:
        lab.start("x", stdin=stdin)
    lab.plan(2, stdin="1")
    a, b = lab.task(0), lab.task(1)
    assert (b"", b"data\n") == (a.all_input(), b.all_input())
    a.end()
    b.end()
    lab.end()
    assert 0 == lab.finish()[0]


def test_files(lab: ProxyLab) -> None:
    """Input from a file; both outputs in one file keep their order; truncated unless APPEND."""
    (lab.dir / "in").write_bytes(b"from file")
    (lab.dir / "out").write_bytes(b"old")
    lab.start("x", stdin=subprocess.DEVNULL)
    lab.plan(1, stdin="file:in", out="file:out", err="file:out")
    task = lab.task(0)
    assert b"from file" == task.all_input()
    for i in range(100):
        (task.err if i % 2 else task.out)(b"%d\n" % i)
    task.end()
    lab.say(Type.OUTPUT, FD=1, DATA="srun itself\n")
    lab.end()
    assert (0, b"srun itself\n", b"") == lab.finish()
    assert b"".join(b"%d\n" % i for i in range(100)) == (lab.dir / "out").read_bytes()


def test_append_and_none(lab: ProxyLab) -> None:
    (lab.dir / "out").write_bytes(b"old")
    lab.start("x")
    lab.plan(1, out="file:out", err="none", append=1)
    task = lab.task(0)
    task.out(b"new")
    task.err(b"lost")
    task.end()
    lab.end()
    assert (0, b"", b"") == lab.finish()
    assert b"oldnew" == (lab.dir / "out").read_bytes()


@pytest.mark.parametrize("plan", [{"stdin": "file:none/x"}, {"out": "file:none/x"}, {"err": "file:none/x"}])
def test_file_that_cannot_be_opened(lab: ProxyLab, plan: dict[str, str]) -> None:
    lab.start("x")
    lab.plan(1, **plan)  # type: ignore[arg-type]
    code, _, err = lab.finish()
    name = {"stdin": "stdin", "out": "stdout", "err": "stderr"}[next(iter(plan))]
    assert (1, f"srun: error: Could not open {name} file none/x: No such file or directory\n") == (code, err.decode())


def test_back_pressure_of_our_output(lab: ProxyLab) -> None:
    """Nobody reads our stdout: the task cannot write on and on, nothing is lost, stderr still works."""
    lab.start("x")
    lab.plan(2)
    a, b = lab.task(0), lab.task(1)
    a.sock.setblocking(False)
    data, sent = random.Random(2).randbytes(60000), 0
    frames = piece(1, data) * 400
    stuck = 0
    while stuck < 20 and sent < len(frames):
        try:
            sent += a.sock.send(frames[sent : sent + 65536])
            stuck = 0
        except BlockingIOError:
            stuck += 1
            time.sleep(0.02)
    assert stuck == 20
    b.err(b"free way\n")
    err = lab.run.stderr
    assert err
    assert b"free way\n" == err.readline()
    b.end()
    a.sock.setblocking(True)
    rest = threading.Thread(target=lambda: (a.sock.sendall(frames[sent:]), a.end()))
    rest.start()
    lab.end()
    time.sleep(6)  # longer than silent tasks are waited for
    assert lab.run.poll() is None
    code, out, _ = lab.finish()
    rest.join()
    assert (0, data * 400) == (code, out)


def test_many_tasks_byte_exact(lab: ProxyLab) -> None:
    """Every task's stream comes out in order, whatever the sizes."""
    count, size = 20, 200000
    lab.start("x")
    lab.plan(count)

    def feed(rank: int) -> None:
        rng, task, left = random.Random(rank), lab.task(rank), size
        while left:
            n = min(left, rng.choice([1, 2, 100, 4095, 4096, 4097, 30000, 65536]))
            task.out(bytes([rank]) * n)
            left -= n
        task.end()

    threads = [threading.Thread(target=feed, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    ender = threading.Thread(target=lambda: ([t.join() for t in threads], lab.end()))
    ender.start()
    code, out, _ = lab.finish()
    ender.join()
    assert 0 == code
    assert [size] * count == [out.count(bytes([r])) for r in range(count)]


def test_reader_of_our_output_leaves(lab: ProxyLab) -> None:
    """As with srun: the data is dropped, the tasks run on."""
    lab.start("x")
    lab.plan(1)
    assert lab.run.stdout
    lab.run.stdout.close()
    lab.run.stdout = None
    task = lab.task(0)
    for _ in range(100):
        task.out(b"x" * 60000)
    task.err(b"still\n")
    task.end()
    lab.end()
    assert (0, b"", b"still\n") == lab.finish()


def test_signals(lab: ProxyLab) -> None:
    lab.start("x")
    assert lab.peer
    for s in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGUSR2,
    ):
        lab.run.send_signal(s)
        told = lab.peer.expect(Type.SRUNSIGNAL)
        assert (lab.srun.get("KEY"), int(s)) == (told.get("KEY"), told.int("SIGNAL"))
    lab.end(143 << 8)
    assert 143 == lab.finish()[0]


def test_shepherd_dies(lab: ProxyLab) -> None:
    lab.start("x")
    lab.plan(1)
    assert lab.peer
    lab.peer.close()
    assert (1, b"srun: error: gpucr: the capsule's shepherd is gone\n") == lab.finish()[::2]


def test_shepherd_dies_after_the_end(lab: ProxyLab) -> None:
    lab.start("x")
    lab.plan(1)
    task = lab.task(0)
    lab.end(3 << 8)
    assert lab.peer
    lab.peer.close()
    time.sleep(0.1)
    task.out(b"late\n")
    task.end()
    assert (3, b"late\n", b"") == lab.finish()


def test_silent_task_is_not_waited_for(lab: ProxyLab) -> None:
    lab.start("x")
    lab.plan(1, label=1)
    task = lab.task(0)
    task.out(b"part")
    begin = time.monotonic()
    lab.end(9)
    assert (137, b"0: part\n", b"") == lab.finish()
    assert 4 < time.monotonic() - begin < 8


@pytest.mark.parametrize("what", ["token", "rank", "kind", "length", "twice", "long"])
def test_strangers_are_sent_away(lab: ProxyLab, what: str) -> None:
    lab.start("x")
    lab.plan(1)
    good = lab.task(0)
    good.out(b"good ")
    assert lab.run.stdout
    assert b"good " == lab.run.stdout.read(5)
    bad = socket.create_connection(("127.0.0.1", lab.srun.int("PORT")), timeout=LIMIT_S)
    token = lab.srun.get("TOKEN")
    hello = {
        "token": f"{'0' * 32} 1\n", "rank": f"{token} x\n", "twice": f"{token} 0\n",
        "long": f"{token} 11111111111111111",
    }.get(what, f"{token} 1\n").encode()  # fmt: skip
    bad.sendall(hello)
    if what == "kind":
        bad.sendall(piece(3, b"x"))
    elif what == "length":
        bad.sendall(b"\x01\xff\xff\xff\x7fabc")
    with contextlib.suppress(ConnectionResetError):
        assert b"" == bad.recv(100).removeprefix(piece(0))
    bad.close()
    good.out(b"still")
    good.end()
    lab.end()
    assert (0, b"still", b"") == lab.finish()


def test_number_of_tasks_not_known(lab: ProxyLab) -> None:
    """The input waits until no more tasks come, or until another plan names their number."""
    lab.start("x", stdin=subprocess.PIPE)
    assert lab.run.stdin
    lab.run.stdin.write(b"hello")
    lab.run.stdin.close()
    lab.run.stdin = None
    lab.plan(0, stdin="all")
    a = lab.task(0)
    time.sleep(0.3)
    b = lab.task(1)
    lab.plan(2, stdin="all")
    assert (b"hello", b"hello") == (a.all_input(), b.all_input())
    a.end()
    b.end()
    lab.end()
    assert 0 == lab.finish()[0]


def test_number_of_tasks_never_known(lab: ProxyLab) -> None:
    lab.start("x", stdin=subprocess.PIPE)
    assert lab.run.stdin
    lab.run.stdin.write(b"hello")
    lab.run.stdin.close()
    lab.run.stdin = None
    lab.plan(0, stdin="all")
    a = lab.task(0)
    assert b"hello" == a.all_input()
    assert b"" == lab.task(1).all_input()
    a.end()
    lab.tasks[1].end()
    lab.end()
    assert 0 == lab.finish()[0]


@pytest.mark.parametrize("env", [{}, {"GPUCR_CAPSULE": "1"}, {"GPUCR_SHEPHERD": "/x"}])
def test_outside_a_capsule_the_real_srun_runs(lab: ProxyLab, env: dict[str, str]) -> None:
    """The next srun on PATH that is not this program."""
    first, second = lab.dir / "a", lab.dir / "b"
    first.mkdir()
    second.mkdir()
    os.symlink(PROXY, first / "srun")
    (second / "srun").write_text("#!/bin/sh\necho real $# $2\n")
    (second / "srun").chmod(0o755)
    run = subprocess.run(
        [first / "srun", "-n2", "a b"], env={"PATH": f"{first}:{second}:/bin", **env}, capture_output=True, check=True
    )
    assert (b"real 2 a b\n", b"") == (run.stdout, run.stderr)
    run = subprocess.run([PROXY], env={"PATH": f"{first}", **env}, capture_output=True)
    assert (1, b"srun: error: gpucr: not inside a protected job, and no other srun is on PATH\n") == (
        run.returncode,
        run.stderr,
    )
