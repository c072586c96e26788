"""One thread of a stopped process runs, and no other, until the rest is let go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting import Counting

from gpucr_hpc.engine.cuda import threads


class Counters(Counting):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "one", "two")
        self.child = subprocess.Popen([sys.executable, "-c", self.program], cwd=folder)
        self.wait()


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Counters]:
    if os.geteuid() != 0:
        pytest.skip("ptrace of another process needs root here")
    made = Counters(tmp_path)
    yield made
    made.child.kill()
    made.child.wait()


def test_one_thread_alone(counters):
    pid = counters.child.pid
    alone = sorted(threads._threads(pid))[1]
    threads.stop(pid)
    assert set() == counters.moving()
    held = threads.Held(pid, alone)
    assert {"one"} == counters.moving()
    held.release()
    assert {"one", "two", "main"} == counters.moving()


def test_thread_that_is_not_there_leaves_a_running_process(counters, monkeypatch):
    """When the one that shall run does not, all are let go on."""
    monkeypatch.setattr(threads, "_LIMIT_S", 0.1)
    pid = counters.child.pid
    threads.stop(pid)
    with pytest.raises(OSError, match="No such file"):
        threads.Held(pid, 1 << 22)
    assert {"one", "two", "main"} == counters.moving()


def test_tracer_that_dies_lets_go(counters):
    pid = counters.child.pid
    code = (
        "import sys, time\nfrom gpucr_hpc.engine.cuda import threads\n"
        f"threads.stop({pid})\nheld = threads.Held({pid}, {pid})\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    tracer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert tracer.stdout is not None
    assert b"held\n" == tracer.stdout.readline()
    assert {"main"} == counters.moving()
    tracer.send_signal(signal.SIGKILL)
    tracer.communicate()
    assert {"one", "two", "main"} == counters.moving()


def test_numbers_inside_and_outside(counters):
    pid = counters.child.pid
    assert pid == threads.outside(pid, threads.inside(pid, pid))
    assert threads.outside(pid, 1 << 22) is None
