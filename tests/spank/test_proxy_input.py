"""gpucr-srun and its standard input: to which tasks, when, and how much at once."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time

import pytest

from .capsule_lab import LIMIT_S
from .proxy_lab import PROXY, ProxyLab

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="spank_plugin is not built")


@pytest.mark.parametrize("late", [False, True])
def test_input_reaches_every_task(proxy: ProxyLab, late: bool) -> None:
    """No byte is read before all tasks are there; then all of them get all of it."""
    data = random.Random(1).randbytes(500000)
    proxy.start("x", stdin=subprocess.PIPE)
    stdin, proxy.run.stdin = proxy.run.stdin, None
    assert stdin
    writer = threading.Thread(target=lambda: (stdin.write(data), stdin.close()))
    writer.start()
    tasks = [proxy.task(0)] if late else []
    proxy.plan(3, stdin="all")
    if late:
        time.sleep(0.1)
    tasks += [proxy.task(r) for r in range(len(tasks), 3)]
    got: dict[int, bytes] = {}
    readers = [threading.Thread(target=lambda i=i: got.update({i: tasks[i].all_input()})) for i in range(3)]
    for t in readers:
        t.start()
    for t in [*readers, writer]:
        t.join(LIMIT_S)
    assert {0: data, 1: data, 2: data} == got
    for t in tasks:
        t.end()
    proxy.end()
    assert (0, b"", b"") == proxy.finish()


def test_a_slow_task_holds_input_back(proxy: ProxyLab) -> None:
    """At most a bounded amount is read ahead of the slowest task; when it leaves, the others go on."""
    proxy.start("x", stdin=subprocess.PIPE)
    stdin, proxy.run.stdin = proxy.run.stdin, None
    assert stdin
    os.set_blocking(stdin.fileno(), False)
    proxy.plan(2, stdin="all")
    fast, slow = proxy.task(0), proxy.task(1)
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
    proxy.end()
    assert 0 == proxy.finish()[0]


def test_input_of_one_rank_and_of_none(proxy: ProxyLab) -> None:
    (proxy.dir / "in").write_bytes(b"data\n")
    with (proxy.dir / "in").open("rb") as stdin:
        proxy.start("x", stdin=stdin)
    proxy.plan(2, stdin="1")
    a, b = proxy.task(0), proxy.task(1)
    assert (b"", b"data\n") == (a.all_input(), b.all_input())
    a.end()
    b.end()
    proxy.end()
    assert 0 == proxy.finish()[0]


def start_with_hello(proxy: ProxyLab) -> None:
    """As input, for a number of tasks that is not known yet."""
    proxy.start("x", stdin=subprocess.PIPE)
    assert proxy.run.stdin
    proxy.run.stdin.write(b"hello")
    proxy.run.stdin.close()
    proxy.run.stdin = None
    proxy.plan(0, stdin="all")


def test_number_of_tasks_not_known(proxy: ProxyLab) -> None:
    """The input waits until no more tasks come, or until another plan names their number."""
    start_with_hello(proxy)
    a = proxy.task(0)
    time.sleep(0.3)
    b = proxy.task(1)
    proxy.plan(2, stdin="all")
    assert (b"hello", b"hello") == (a.all_input(), b.all_input())
    a.end()
    b.end()
    proxy.end()
    assert 0 == proxy.finish()[0]


def test_number_of_tasks_never_known(proxy: ProxyLab) -> None:
    start_with_hello(proxy)
    a = proxy.task(0)
    assert b"hello" == a.all_input()
    assert b"" == proxy.task(1).all_input()
    a.end()
    proxy.tasks[1].end()
    proxy.end()
    assert 0 == proxy.finish()[0]
