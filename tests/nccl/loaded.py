"""Python programs under the interposer, and what tests and they say to each other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from gpucr_hpc.engine.nccl.link import Link
from gpucr_hpc.engine.nccl.node import NodeRanks
from tests.nccl import rig

FAKE = rig.BUILD / "fake" / "lib"
#: The interposer's communicators begin with it.
OURS = 0x6770756372636F6D


def program(folder: Path, code: str, *, library: Path = FAKE / "libnccl.so.2") -> subprocess.Popen[str]:
    """One that loads NCCL by itself, as CuPy and JAX do; one rank."""
    start = f"""
        import ctypes, os, sys
        ctypes.CDLL("{FAKE}/libcuda.so.1", ctypes.RTLD_GLOBAL)
        cuda = ctypes.CDLL("{FAKE}/libcuda.so.1")
        nccl = ctypes.CDLL("{library}")
        cuda.fake_stream.restype = ctypes.c_void_p
        class Id(ctypes.Structure): _fields_ = [("b", ctypes.c_char * 128)]
        unique, comm = Id(), ctypes.c_void_p()
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0) == 0
        stream = ctypes.c_void_p(cuda.fake_stream())
        a, b = (ctypes.c_int64 * 4)(1, 2, 3, 4), (ctypes.c_int64 * 4)()
        def reduce(): return nccl.ncclAllReduce(a, b, ctypes.c_size_t(4), 4, 0, comm, stream)
        assert reduce() == 0
        magic = ctypes.c_uint64.from_address(comm.value).value
    """
    return python(folder, textwrap.dedent(start) + textwrap.dedent(code))


def python(folder: Path, source: str) -> subprocess.Popen[str]:
    """A Python program under the interposer."""
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env=rig.environment(folder, "plain"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line == "ready\n", (line, child.stderr and child.stderr.read())


def answer(child: subprocess.Popen[str], lines: str = "\n") -> None:
    """What a program that has said that it is ready waits for."""
    assert child.stdin is not None
    child.stdin.write(lines)
    child.stdin.flush()


async def rank(folder: Path, pid: int) -> NodeRanks:
    return NodeRanks([await Link.connect(folder / f"gpucr-nccl.{pid}", pid, os.getuid())])
