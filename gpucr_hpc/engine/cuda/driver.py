"""The driver's checkpoint calls, thin and typed. Only a worker process loads this: a call can hang for good.

Two ways to the same six functions of libcuda.so.1. `cuda.bindings` (extra `gpu`) is taken when it is installed, ctypes
when not: the agent runs under the distribution's Python, for which no package of these bindings exists, and their
major version must match the driver's, while the functions are few and their argument structures fixed at 64 bytes.
Source: CUDA driver API 13.0, "Coredump and process checkpointing"; cuda.h.
"""

from __future__ import annotations

import ctypes
import enum
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

NOT_READY = 600
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
# GetRestoreThreadId of a process that has no CUDA: invalid value, not initialized.
NO_CUDA = frozenset({1, 3})


class State(enum.IntEnum):
    """CUprocessState. LOCKED: calls of the process to CUDA wait. CHECKPOINTED: and its memory is on the host."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CallFailed(Exception):
    """A call of the driver returned `code`, CUresult `name`."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class CallMissing(Exception):
    """The driver, or libcuda itself, is not there or too old; the reason is its text."""


class Driver(Protocol):
    """pid: in the caller's pid namespace, also for processes of a nested one. Every call may raise CallFailed."""

    def restore_thread(self, pid: int) -> int | None:
        """The thread that does the driver's work in a process, by the caller's pid namespace like pid; None when the
        process has not initialized CUDA.

        Must not be asked of a stopped or frozen process.
        """

    def state(self, pid: int) -> State: ...

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Let CUDA calls of the process wait, and wait for work under way: at most timeout_ms, then NOT_READY."""

    def checkpoint(self, pid: int) -> None:
        """Copy the memory of a LOCKED process to the host and give its GPUs back. It must not be stopped."""

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """Copy back; the process stays LOCKED. gpus: old to new UUID of every GPU that the process saw, or empty."""

    def unlock(self, pid: int) -> None: ...

    def warm(self) -> None:
        """Do what makes the first restore slow (cuInit)."""


class _Args(ctypes.Structure):
    """CUcheckpointLockArgs, CheckpointArgs, UnlockArgs: 64 bytes, zero but for the first member."""

    _fields_ = (("first", ctypes.c_uint), ("reserved", ctypes.c_char * 60))


class _Pair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class _RestoreArgs(ctypes.Structure):
    _fields_ = (("pairs", ctypes.POINTER(_Pair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_char * 52))


def uuid_bytes(text: str) -> bytes:
    """The 16 bytes of `GPU-xxxxxxxx-...`; ValueError for anything else, a MIG instance among it."""
    if not text.startswith("GPU-"):
        raise ValueError(f"not the UUID of a whole GPU: {text}")
    return uuid.UUID(text[4:]).bytes


class CtypesDriver:
    """libcuda.so.1 by ctypes."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CallMissing(f"libcuda.so.1 cannot be loaded: {error}") from None
        if not hasattr(self._lib, "cuCheckpointProcessLock"):
            raise CallMissing("the driver is older than 570 and has no checkpoint calls")

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise CallFailed(name, code, (text.value or b"?").decode())

    def restore_thread(self, pid: int) -> int | None:
        found = ctypes.c_int()
        try:
            self._call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(found))
        except CallFailed as error:
            if error.code in NO_CUDA:
                return None
            raise
        return found.value

    def state(self, pid: int) -> State:
        found = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(found))
        return State(found.value)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(_Args(timeout_ms)))

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, ctypes.byref(_Args()))

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        pairs = (_Pair * len(gpus))()
        for pair, (old, new) in zip(pairs, gpus.items(), strict=True):
            pair.old[:], pair.new[:] = uuid_bytes(old), uuid_bytes(new)
        args = _RestoreArgs(pairs, len(gpus)) if gpus else _RestoreArgs()
        self._call("cuCheckpointProcessRestore", pid, ctypes.byref(args))

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, ctypes.byref(_Args()))

    def warm(self) -> None:
        self._call("cuInit", 0)


class BindingsDriver:
    """The same through cuda.bindings."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CallMissing(f"cuda.bindings: {error}") from None
        if not hasattr(driver, "CUcheckpointGpuPair"):
            raise CallMissing("cuda.bindings is older than 13.0 and has no GPU map")
        self._driver: Any = driver

    def _call(self, name: str, *args: Any) -> Any:
        try:
            code, *values = getattr(self._driver, name)(*args)
        except RuntimeError as error:  # the driver has no such function
            raise CallMissing(str(error)) from None
        if code:
            raise CallFailed(name, int(code), getattr(code, "name", "?"))
        return values[0] if values else None

    def restore_thread(self, pid: int) -> int | None:
        try:
            return int(self._call("cuCheckpointProcessGetRestoreThreadId", pid))
        except CallFailed as error:
            if error.code in NO_CUDA:
                return None
            raise

    def state(self, pid: int) -> State:
        return State(int(self._call("cuCheckpointProcessGetState", pid)))

    def lock(self, pid: int, timeout_ms: int) -> None:
        args = self._driver.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        args, kept, pairs = None, [], []
        for names in gpus.items():
            pair = self._driver.CUcheckpointGpuPair()
            buffers = [ctypes.create_string_buffer(uuid_bytes(name), 16) for name in names]
            pair.oldUuid, pair.newUuid = (self._driver.CUuuid(ctypes.addressof(b)) for b in buffers)
            kept += buffers
            pairs.append(pair)
        if pairs:
            args = self._driver.CUcheckpointRestoreArgs()
            args.gpuPairs = pairs
            args.gpuPairsCount = len(pairs)
        self._call("cuCheckpointProcessRestore", pid, args)
        del kept

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def warm(self) -> None:
        self._call("cuInit", 0)


def load(kind: str = "auto") -> Driver:
    """The driver of this host: `bindings`, `ctypes`, or the first that is there. Raises CallMissing."""
    if kind == "bindings":
        return BindingsDriver()
    if kind == "ctypes":
        return CtypesDriver()
    try:
        return BindingsDriver()
    except CallMissing:
        return CtypesDriver()
