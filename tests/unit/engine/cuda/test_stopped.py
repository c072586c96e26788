"""GPU processes of a pid namespace, dumped stopped: only the driver's thread runs until GPU memory is back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from counting import Counting

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import client, threads
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.driver import State
from gpucr_hpc.engine.cuda.fake import FakeDriver
from gpucr_hpc.engine.cuda.node import NodeGpus

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace and ptrace need root here")

CONFIG = CudaConfig(copy_limit_s=20.0, memory_wait_s=0.0, stop_threads=True)
HOLD = """
import mmap
library = open("libcuda.so.1", "r+b")
held = mmap.mmap(library.fileno(), 4096)
"""


class Nested(Counting):
    """A process of three threads in a pid namespace of its own, so that all numbers differ from those here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "other", "driver")  # the youngest is the driver's for the fake
        (folder / "libcuda.so.1").write_bytes(b"x" * 4096)
        program = HOLD + self.program
        self._shell = subprocess.Popen(
            ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c", program], cwd=folder
        )
        self.wait()
        children = Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()
        self.pid = int(children[0])

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
        assert nested.moving() == set(nested.names)

    run(nested, work)
    assert FakeDriver(str(nested.folder)).state(nested.pid) is State.RUNNING


def test_failed_copy_back_lets_all_threads_go(nested):
    async def work(gpus: NodeGpus) -> None:
        await gpus.lock()
        await gpus.checkpoint()
        (nested.folder / "inject").write_text("restore die\n")
        await gpus.resume()
        assert nested.moving() == set(nested.names)

    run(nested, work)
    assert FakeDriver(str(nested.folder)).state(nested.pid) is State.RUNNING


def test_without_the_setting_nothing_is_stopped(nested):
    async def work(gpus: NodeGpus) -> None:
        await gpus.lock()
        await gpus.checkpoint()
        assert nested.moving() == set(nested.names)
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
