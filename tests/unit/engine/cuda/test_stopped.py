"""GPU processes of a pid namespace, dumped stopped: only the driver's thread runs until GPU memory is back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import client, threads
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.driver import State
from gpucr_hpc.engine.cuda.fake import FakeDriver
from gpucr_hpc.engine.cuda.node import NodeGpus

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace and ptrace need root here")

# The youngest thread is the driver's for the fake.
PROGRAM = """
import mmap, threading, time
library = open("libcuda.so.1", "r+b")
held = mmap.mmap(library.fileno(), 4096)
def count(name):
    with open(name, "a", buffering=1) as file:
        while True:
            file.write("x")
            file.flush()
            time.sleep(0.002)
threading.Thread(target=count, args=("other",), daemon=True).start()
threading.Thread(target=count, args=("driver",), daemon=True).start()
count("main")
"""
CONFIG = CudaConfig(copy_limit_s=20.0, memory_wait_s=0.0, stop_threads=True)
NAMES = ("main", "other", "driver")


class Nested:
    """A process of three threads in a pid namespace of its own, so that all numbers differ from those here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "libcuda.so.1").write_bytes(b"x" * 4096)
        self._shell = subprocess.Popen(
            ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c", PROGRAM], cwd=folder
        )
        self._wait(lambda: all((folder / name).exists() for name in NAMES))
        children = Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()
        self.pid = int(children[0])

    @staticmethod
    def _wait(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def sizes(self) -> dict[str, int]:
        return {name: (self.folder / name).stat().st_size for name in NAMES}

    def moving(self) -> set[str]:
        """Names of the threads that run."""
        before = self.sizes()
        time.sleep(0.2)
        return {name for name, size in self.sizes().items() if size > before[name]}

    def close(self) -> None:
        self._shell.kill()
        self._shell.wait()


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nested]:
    monkeypatch.setenv(client.FAKE_VARIABLE, str(tmp_path))
    made = Nested(tmp_path)
    yield made
    made.close()


def run(nested: Nested, work: Callable[[NodeGpus], Awaitable[None]], config: CudaConfig = CONFIG) -> None:
    async def whole() -> None:
        gpus = NodeGpus("7", config)
        process = read_process(nested.pid)
        assert process is not None
        try:
            await gpus.find([process])
            await work(gpus)
        finally:
            await gpus.close()

    asyncio.run(whole())


def test_drivers_thread_alone_while_memory_comes_back(nested):
    """By its number in the namespace, though the driver says the number outside."""

    async def work(gpus: NodeGpus) -> None:
        outside = FakeDriver(str(nested.folder)).restore_thread(nested.pid)
        assert gpus.processes[0].thread == threads.inside(nested.pid, outside)
        assert gpus.processes[0].thread != outside
        await gpus.lock()
        await gpus.checkpoint()
        assert nested.moving() == set()
        (nested.folder / "inject").write_text("restore slow\n")
        before = nested.sizes()
        back = asyncio.ensure_future(gpus.restore({}))
        while nested.sizes()["driver"] < before["driver"] + 20:
            await asyncio.sleep(0.01)
        middle = nested.sizes()
        assert {name: middle[name] for name in ("main", "other")} == {name: before[name] for name in ("main", "other")}
        assert not back.done()
        await back
        await gpus.go()
        assert nested.moving() == set(NAMES)

    run(nested, work)
    assert FakeDriver(str(nested.folder)).state(nested.pid) is State.RUNNING


def test_failed_copy_back_lets_all_threads_go(nested):
    async def work(gpus: NodeGpus) -> None:
        await gpus.lock()
        await gpus.checkpoint()
        (nested.folder / "inject").write_text("restore die\n")
        await gpus.resume()
        assert nested.moving() == set(NAMES)

    run(nested, work)
    assert FakeDriver(str(nested.folder)).state(nested.pid) is State.RUNNING


def test_without_the_setting_nothing_is_stopped(nested):
    async def work(gpus: NodeGpus) -> None:
        await gpus.lock()
        await gpus.checkpoint()
        assert nested.moving() == set(NAMES)
        await gpus.resume()

    run(nested, work, replace(CONFIG, stop_threads=False))


@pytest.mark.parametrize("control", [False, True])
def test_shell_with_job_control_would_see_the_stop(tmp_path, control):
    script = f"set {'-m' if control else '+m'}; sleep 100 & echo $!; wait"
    shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    try:
        assert control == procfs.under_job_control(pid)
    finally:
        os.killpg(os.getpgid(pid), 9)
        shell.kill()
        shell.communicate()
