"""The process that calls the driver, for one GPU process of a job: a call that hangs is ended with it.

Started by client.CudaWorker. Orders come as lines of JSON on stdin, {"do": verb, ...}; each is answered on the
descriptor of argv[1] by {"ok": ...} or {"error": {"id": class, "fields": {...}}}. When the agent dies stdin ends, and
so does this process; what state a GPU process is in is looked up by the next agent, never remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.engine.cuda import driver as drivers
from gpucr_hpc.engine.cuda import inventory, threads
from gpucr_hpc.engine.cuda.driver import CallFailed, CallMissing, Driver
from gpucr_hpc.engine.cuda.fake import FakeDriver
from gpucr_hpc.errors import (
    CudaCallFailed,
    CudaDriverUnusable,
    CudaMemoryTaken,
    CudaNotReady,
    CudaNotSupported,
    GpucrError,
)


class Worker:
    """Verbs of a worker; kind: as driver.load, or `fake:DIRECTORY` in tests."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._driver: Driver | None = None
        self._held: threads.Held | None = None

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            if self._kind.startswith("fake:"):
                self._driver = FakeDriver(self._kind.removeprefix("fake:"))
            else:
                self._driver = drivers.load(self._kind)
        return self._driver

    def do_warm(self) -> str:
        self.driver.warm()
        return type(self.driver).__name__

    def do_inventory(self) -> dict[str, Any]:
        if isinstance(self.driver, FakeDriver):
            return self.driver.inventory().as_dict()
        return inventory.read().as_dict()

    def do_look(self, pids: list[int]) -> list[list[int]]:
        """[pid, its driver's thread] of those of these processes that have initialized CUDA.

        The driver says the thread's number here; what survives a move is the number in the process's own namespace.
        """
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        found = [(pid, self.driver.restore_thread(pid)) for pid in alive]
        return [[pid, threads.inside(pid, tid)] for pid, tid in found if tid is not None]

    def do_stop(self, pid: int) -> None:
        threads.stop(pid)

    def do_wake(self, pid: int, thread: int) -> bool:
        """Let the driver's thread (its number in the process's namespace) of a stopped process run, alone.

        False when the process was not stopped, and nothing is done.
        """
        process = read_process(pid)
        if process is None or process.state != "T":
            return False
        alone = threads.outside(pid, thread)
        if alone is None:
            raise CudaCallFailed(pid=pid, call="wake", reason=f"it has no thread {thread}")
        self._held = threads.Held(pid, alone)
        return True

    def do_release(self) -> None:
        """Let the threads go that `wake` held back."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def do_state(self, pid: int) -> int:
        return int(self.driver.state(pid))

    def do_lock(self, pid: int, timeout_ms: int) -> float:
        return self._timed(lambda: self.driver.lock(pid, timeout_ms), pid, timeout_ms)

    def do_checkpoint(self, pid: int) -> float:
        return self._timed(lambda: self.driver.checkpoint(pid), pid)

    def do_restore(self, pid: int, gpus: dict[str, str]) -> float:
        return self._timed(lambda: self.driver.restore(pid, gpus), pid)

    def do_unlock(self, pid: int) -> float:
        return self._timed(lambda: self.driver.unlock(pid), pid)

    @staticmethod
    def _timed(call: Callable[[], None], pid: int, timeout_ms: int = 0) -> float:
        """Seconds that a call of the driver took, or its error in words."""
        start = time.monotonic()
        try:
            call()
        except CallFailed as error:
            raise translate(error, pid, timeout_ms) from None
        return time.monotonic() - start

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        verb: Callable[..., Any] = getattr(self, "do_" + order.pop("do"))
        try:
            return {"ok": verb(**order)}
        except CallFailed as error:
            return _error(translate(error, order.get("pid", 0), 0))
        except CallMissing as error:
            return _error(CudaDriverUnusable(reason=str(error)))
        except GpucrError as error:
            return _error(error)
        except Exception as error:
            return _error(GpucrError(reason=repr(error)))


def translate(error: CallFailed, pid: int, timeout_ms: int) -> GpucrError:
    """A failed call of the driver by its cause."""
    reason = f"{error.name} ({error.code})"
    if error.code == drivers.NOT_READY:
        return CudaNotReady(pid=pid, timeout_ms=timeout_ms)
    if error.code == drivers.NOT_SUPPORTED:
        return CudaNotSupported(pid=pid, call=error.call, reason=reason)
    if error.code == drivers.OUT_OF_MEMORY and error.call.endswith("Restore"):
        return CudaMemoryTaken(pid=pid, reason=reason)
    return CudaCallFailed(pid=pid, call=error.call, reason=reason)


def _error(error: GpucrError) -> dict[str, Any]:
    fields = {k: v if isinstance(v, int | float) else str(v) for k, v in error.fields.items()}
    return {"error": {"id": type(error).__name__, "fields": fields}}


def main() -> None:
    """Entry of the process: argv is the answers' descriptor and the kind of driver."""
    worker = Worker(sys.argv[2])
    # Nobody reads an answer when the agent has died.
    with contextlib.suppress(BrokenPipeError), open(int(sys.argv[1]), "w", buffering=1) as answers:
        for line in sys.stdin:
            answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
