"""Let one thread of a stopped process run, and no other.

The driver restores GPU memory in a thread of the process itself. Until it is back no other thread may run: after CRIU's
restore a waiting call of libcuda wakes up, looks into memory that is not mapped yet, and the process dies by SIGSEGV
(seen with JAX on an H100, driver 580). So a GPU process is stopped (SIGSTOP) after its checkpoint, is dumped and comes
back stopped; then all threads but the driver's are seized by ptrace, SIGCONT lets that one run, and when the driver has
done its work the others are let go. A tracer that dies lets go by itself: the kernel sees to it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from gpucr_hpc.errors import CudaCallFailed

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # ptrace(2)
_WALL = 0x40000000
_LIMIT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int) -> None:
    if _libc.ptrace(request, tid, None, None) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _threads(pid: int) -> list[int]:
    return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]


def _field(pid: int, tid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text(errors="replace")
    return text.partition(f"{name}:")[2].partition("\n")[0].strip()


def inside(pid: int, tid: int) -> int:
    """Number of a thread in the pid namespace of its process: what survives a move."""
    return int(_field(pid, tid, "NSpid").split()[-1])


def outside(pid: int, tid: int) -> int | None:
    """Number here of a thread that is known by its number in the pid namespace of its process."""
    return next((found for found in _threads(pid) if inside(pid, found) == tid), None)


def _wait_state(pid: int, tids: list[int], *, stopped: bool, what: str) -> None:
    end = time.monotonic() + _LIMIT_S
    while any((_field(pid, tid, "State")[0] == "T") != stopped for tid in tids):
        if time.monotonic() > end:
            raise CudaCallFailed(pid=pid, call=what, reason=f"no answer from its threads within {_LIMIT_S:.0f} s")
        time.sleep(0.001)


def stop(pid: int) -> None:
    """Stop a process and wait until every thread has."""
    os.kill(pid, signal.SIGSTOP)
    _wait_state(pid, _threads(pid), stopped=True, what="stop")


class Held:
    """The threads of one process but one, seized by the calling thread of this program."""

    def __init__(self, pid: int, alone: int) -> None:
        """Let thread `alone` (its number here) of a stopped process go on, and no other.

        On any failure all go on.
        """
        self._pid, self._tids = pid, list[int]()
        try:
            while new := [t for t in _threads(pid) if t != alone and t not in self._tids]:
                for tid in new:
                    self._seize(tid)
            os.kill(pid, signal.SIGCONT)
            _wait_state(pid, [alone], stopped=False, what="continue")
        except BaseException:
            self.release()
            os.kill(pid, signal.SIGCONT)
            raise

    def _seize(self, tid: int) -> None:
        try:
            _ptrace(_SEIZE, tid)
        except ProcessLookupError:
            return  # it has ended
        self._tids.append(tid)
        _ptrace(_INTERRUPT, tid)
        os.waitpid(tid, _WALL)

    def release(self) -> None:
        """Let all go on."""
        for tid in self._tids:
            try:
                _ptrace(_DETACH, tid)
            except OSError:
                continue  # it has ended, or been killed
        self._tids.clear()
