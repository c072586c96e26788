"""A driver without a card, for tests: a state machine that refuses a wrong order and fails as it is told.

Its directory holds `gpus.json` (an Inventory, optional), one file of state for each process, and `inject`: lines of
`CALL WHAT [COUNT]`, each taken off when it has acted COUNT times (1). CALL is lock, checkpoint, restore, unlock, state
or look; WHAT is a number (the call returns this CUresult), `hang`, `slow` (a second), `die` (the worker), or `fail`
(the process goes to FAILED).
A process is known by GPUCR_FAKE_GPU of its environment, which survives a restore, else by its pid. One that was
restored is in the state in which it was dumped, whatever has become of the first since. One with GPUCR_FAKE_COPY in
its environment does what a real driver's thread does in it: it is told "out N" or "back N" in the file `copy` of its
working directory, makes or gives up host memory, and says the same in `copied`; what is injected comes after that.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gpucr_hpc.engine.cuda.driver import NOT_READY, CallFailed, State
from gpucr_hpc.engine.cuda.inventory import Gpu, Inventory

_ILLEGAL_STATE, _INVALID_VALUE = 401, 1
_GIB = 1 << 30
_COPIES = {"checkpoint": "out", "restore": "back"}
_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    600: "CUDA_ERROR_NOT_READY",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}


class FakeDriver:
    """Implements driver.Driver."""

    def __init__(self, directory: str) -> None:
        self._dir = Path(directory)
        self._journal = self._dir / "journal"

    def inventory(self) -> Inventory:
        path = self._dir / "gpus.json"
        if path.exists():
            return Inventory.from_dict(json.loads(path.read_text()))
        uuid = "GPU-00000000-0000-0000-0000-000000000000"
        return Inventory("580.1", (Gpu(0, uuid, "Fake H100", 0, 80 * _GIB, 0),))

    def restore_thread(self, pid: int) -> int | None:
        """The thread of the fake libcuda (spank_plugin/nccl/fake), by its number here; without one the youngest."""
        self._inject("look", pid)
        if self._name(pid) == "none":
            return None
        names = {}
        for entry in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # others come and go
                names[int(entry)] = Path(f"/proc/{pid}/task/{entry}/comm").read_text()
        own = [number for number, name in names.items() if name.startswith("cuda-")]
        return max(own or names)

    def state(self, pid: int) -> State:
        self._inject("state", pid)
        with self._held():
            return self._read(pid)

    def lock(self, pid: int, timeout_ms: int) -> None:  # noqa: ARG002 - what is busy, `inject` says
        self._step("lock", pid, {State.RUNNING}, State.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._step("checkpoint", pid, {State.LOCKED}, State.CHECKPOINTED)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        known = {gpu.uuid for gpu in self.inventory().gpus}
        if not set(gpus.values()) <= known:
            raise self._failed("restore", _INVALID_VALUE)
        self._step("restore", pid, {State.CHECKPOINTED}, State.LOCKED)

    def unlock(self, pid: int) -> None:
        self._step("unlock", pid, {State.LOCKED}, State.RUNNING)

    def warm(self) -> None:
        """Nothing is slow here."""

    # --- how -----------------------------------------------------------------------------------------------

    @contextmanager
    def _held(self) -> Iterator[None]:
        with (self._dir / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _step(self, call: str, pid: int, wanted: set[State], after: State) -> None:
        if call in _COPIES and b"GPUCR_FAKE_COPY=" in self._environ(pid) and self.state(pid) in wanted:
            self._copy(call, pid)
        self._inject(call, pid)
        with self._held():
            found = self._read(pid)
            self._note(f"{call} {self._name(pid)} {found.name}")
            if found not in wanted:
                raise self._failed(call, _ILLEGAL_STATE)
            self._write(pid, after)

    def _copy(self, call: str, pid: int) -> None:
        """Returns when the process has done it; how long that may take is the caller's affair."""
        here = Path(f"/proc/{pid}/cwd")
        order = f"{_COPIES[call]} {time.monotonic_ns()}"
        (here / "copy.new").write_text(order)
        (here / "copy.new").rename(here / "copy")
        while not (here / "copied").exists() or (here / "copied").read_text() != order:
            time.sleep(0.01)

    def _inject(self, call: str, pid: int) -> None:
        with self._held():
            what = self._take(call)
            if what is not None:
                self._note(f"{call} {self._name(pid)} injected {what}")
            if what == "fail":
                self._write(pid, State.FAILED)
        if what == "slow":
            time.sleep(1.0)
            return
        if what == "hang":
            time.sleep(3600)
        elif what == "die":
            os._exit(9)
        elif what == "fail":
            raise self._failed(call, 999)
        elif what is not None:
            if int(what) == NOT_READY:
                time.sleep(0.01)
            raise self._failed(call, int(what))

    def _take(self, call: str) -> str | None:
        path = self._dir / "inject"
        if not path.exists():
            return None
        lines = path.read_text().splitlines()
        for at, line in enumerate(lines):
            name, what, *count = line.split()
            if name == call:
                left = int(count[0]) - 1 if count else 0
                lines[at : at + 1] = [f"{name} {what} {left}"] if left else []
                path.write_text("".join(f"{text}\n" for text in lines))
                return what
        return None

    @staticmethod
    def _failed(call: str, code: int) -> CallFailed:
        return CallFailed(f"cuCheckpointProcess{call.capitalize()}", code, _NAMES.get(code, "CUDA_ERROR_UNKNOWN"))

    def _environ(self, pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            raise self._failed("look", _INVALID_VALUE) from None

    def _name(self, pid: int) -> str:
        found = re.search(rb"(?:^|\0)GPUCR_FAKE_GPU=([^\0/]+)", self._environ(pid))
        return found[1].decode() if found else f"pid-{pid}"

    def _read(self, pid: int) -> State:
        path, saved = self._dir / f"state-{self._name(pid)}", self._dir / f"saved-{self._name(pid)}"
        if not path.exists():
            return State.RUNNING
        if saved.exists() and saved.read_text() != self._instance(pid):
            return State.CHECKPOINTED
        return State[path.read_text()]

    def _write(self, pid: int, state: State) -> None:
        (self._dir / f"state-{self._name(pid)}").write_text(state.name)
        saved = self._dir / f"saved-{self._name(pid)}"
        if state is State.CHECKPOINTED or saved.exists():
            saved.write_text(self._instance(pid))

    def _instance(self, pid: int) -> str:
        """What a restored process has of its own: its pid here and when it began."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            raise self._failed("look", _INVALID_VALUE) from None
        return f"{pid} {fields[19]}"

    def _note(self, text: str) -> None:
        with self._journal.open("a") as file:
            file.write(text + "\n")
