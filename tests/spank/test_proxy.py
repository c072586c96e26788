"""gpucr-srun against a pretended shepherd and pretended tasks: its request and what it prints."""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gpucr_hpc.wire import Type

from .capsule_lab import wait_until
from .proxy_lab import PROXY, ProxyLab, piece

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="spank_plugin is not built")


def test_request(proxy: ProxyLab) -> None:
    """What srun would need is told: arguments, surroundings, a key, a token and a port."""
    srun = proxy.start("-n", "2", "--label", "a=b", "", env={"X": "y=z"})
    assert re.fullmatch("[0-9a-f]{16}", srun.get("KEY"))
    assert re.fullmatch("[0-9a-f]{32}", srun.get("TOKEN"))
    assert ["-n", "2", "--label", "a=b", ""] == srun.all("ARG")
    assert "X=y=z" in srun.all("ENV")
    umask = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert umask
    assert (str(proxy.dir), int(umask[1], 8)) == (srun.get("CWD"), int(srun.get("UMASK"), 8))
    assert 0 < srun.int("PORT") < 65536
    assert 16 == len(srun.all("RLIMIT"))
    proxy.end(7 << 8)
    assert (7, b"", b"") == proxy.finish()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1 << 8, 1), (143 << 8, 143), (9, 137)])
def test_exit_status(proxy: ProxyLab, status: int, code: int) -> None:
    proxy.start("true")
    proxy.end(status)
    assert code == proxy.finish()[0]


def test_output_of_tasks_and_of_srun(proxy: ProxyLab) -> None:
    """Own descriptors, unlabelled; a NUL byte stands between two DATA."""
    proxy.start("x")
    proxy.plan(1)
    task = proxy.task(0)
    task.out(b"no newline")
    task.err(b"err\0\xff\n")
    task.end()
    assert task.closed_by_proxy()
    proxy.say(Type.OUTPUT, ("DATA", ["a\n", "b"]), FD=1)
    proxy.say(Type.OUTPUT, FD=2, DATA="srun: error: x\n")
    proxy.end()
    assert (0, b"no newlinea\n\0b", b"err\0\xff\nsrun: error: x\n") == proxy.finish()


def test_data_before_the_plan_waits(proxy: ProxyLab) -> None:
    """The connection is taken at once (CRIU cannot dump it otherwise), its data when the plan is there."""
    proxy.start("x")
    before = proxy.fd_count()
    task = proxy.task(1)
    task.out(b"one\n")
    wait_until(lambda: proxy.fd_count() == before + 1)
    time.sleep(0.1)
    out = proxy.run.stdout
    assert out
    os.set_blocking(out.fileno(), False)
    assert out.read() is None
    os.set_blocking(out.fileno(), True)
    proxy.plan(12, label=1)
    assert b" 1: one\n" == out.readline()
    task.end()
    proxy.end()
    assert 0 == proxy.finish()[0]


def test_labels(proxy: ProxyLab) -> None:
    """Whole lines, label as wide as the largest rank; an unfinished line ends with the task; long ones are cut."""
    proxy.start("x")
    proxy.plan(11, label=1)
    a, b = proxy.task(0), proxy.task(10)
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
    proxy.end()
    code, out, _ = proxy.finish()
    lines = out.split(b"\n")
    assert 0 == code
    assert [b" 0: hello", b" 0: ", b" 0: rest"] == [x for x in lines if x.startswith(b" 0")]
    ten = [x[4:] for x in lines if x.startswith(b"10: ")]
    assert [b"B1", b"B2", b"B3"] == ten[:3]
    assert b"z" * 200000 == b"".join(ten[3:])
    assert max(map(len, ten)) <= 2 * 65536
    assert len(lines) == 3 + len(ten) + 1


def test_labels_with_random_pieces(proxy: ProxyLab) -> None:
    rng = random.Random(7)
    wanted = {r: [f"line {i} of {r} " + "x" * rng.randrange(300) for i in range(400)] for r in range(3)}
    proxy.start("x")
    proxy.plan(3, label=1)

    def feed(rank: int) -> None:
        rng, task = random.Random(rank), proxy.task(rank)
        data = "".join(x + "\n" for x in wanted[rank]).encode()
        while data:
            n = rng.randrange(1, 900)
            task.out(data[:n])
            data = data[n:]
        task.end()

    threads = [threading.Thread(target=feed, args=(r,)) for r in wanted]
    for t in threads:
        t.start()
    reader = threading.Thread(target=lambda: (time.sleep(0.1), [t.join() for t in threads], proxy.end()))
    reader.start()
    code, out, _ = proxy.finish()
    reader.join()
    assert 0 == code
    for rank in wanted:
        assert wanted[rank] == [x[3:] for x in out.decode().splitlines() if x.startswith(f"{rank}: ")]


def test_files(proxy: ProxyLab) -> None:
    """Input from a file; both outputs in one file keep their order; truncated unless APPEND."""
    (proxy.dir / "in").write_bytes(b"from file")
    (proxy.dir / "out").write_bytes(b"old")
    proxy.start("x", stdin=subprocess.DEVNULL)
    proxy.plan(1, stdin="file:in", out="file:out", err="file:out")
    task = proxy.task(0)
    assert b"from file" == task.all_input()
    for i in range(100):
        (task.err if i % 2 else task.out)(b"%d\n" % i)
    task.end()
    proxy.say(Type.OUTPUT, FD=1, DATA="srun itself\n")
    proxy.end()
    assert (0, b"srun itself\n", b"") == proxy.finish()
    assert b"".join(b"%d\n" % i for i in range(100)) == (proxy.dir / "out").read_bytes()


def test_append_and_none(proxy: ProxyLab) -> None:
    (proxy.dir / "out").write_bytes(b"old")
    proxy.start("x")
    proxy.plan(1, out="file:out", err="none", append=1)
    task = proxy.task(0)
    task.out(b"new")
    task.err(b"lost")
    task.end()
    proxy.end()
    assert (0, b"", b"") == proxy.finish()
    assert b"oldnew" == (proxy.dir / "out").read_bytes()


@pytest.mark.parametrize("plan", [{"stdin": "file:none/x"}, {"out": "file:none/x"}, {"err": "file:none/x"}])
def test_file_that_cannot_be_opened(proxy: ProxyLab, plan: dict[str, str]) -> None:
    proxy.start("x")
    proxy.plan(1, **plan)  # type: ignore[arg-type]
    code, _, err = proxy.finish()
    name = {"stdin": "stdin", "out": "stdout", "err": "stderr"}[next(iter(plan))]
    assert (1, f"srun: error: Could not open {name} file none/x: No such file or directory\n") == (code, err.decode())


def test_back_pressure_of_our_output(proxy: ProxyLab) -> None:
    """Nobody reads our stdout: the task cannot write on and on, nothing is lost, stderr still works."""
    proxy.start("x")
    proxy.plan(2)
    a, b = proxy.task(0), proxy.task(1)
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
    err = proxy.run.stderr
    assert err
    assert b"free way\n" == err.readline()
    b.end()
    a.sock.setblocking(True)
    rest = threading.Thread(target=lambda: (a.sock.sendall(frames[sent:]), a.end()))
    rest.start()
    proxy.end()
    time.sleep(6)  # longer than silent tasks are waited for
    assert proxy.run.poll() is None
    code, out, _ = proxy.finish()
    rest.join()
    assert (0, data * 400) == (code, out)


def test_many_tasks_byte_exact(proxy: ProxyLab) -> None:
    """Every task's stream comes out in order, whatever the sizes."""
    count, size = 20, 200000
    proxy.start("x")
    proxy.plan(count)

    def feed(rank: int) -> None:
        rng, task, left = random.Random(rank), proxy.task(rank), size
        while left:
            n = min(left, rng.choice([1, 2, 100, 4095, 4096, 4097, 30000, 65536]))
            task.out(bytes([rank]) * n)
            left -= n
        task.end()

    threads = [threading.Thread(target=feed, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    ender = threading.Thread(target=lambda: ([t.join() for t in threads], proxy.end()))
    ender.start()
    code, out, _ = proxy.finish()
    ender.join()
    assert 0 == code
    assert [size] * count == [out.count(bytes([r])) for r in range(count)]
