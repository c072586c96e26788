"""The only module that starts programs and waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpucr_hpc.errors import ToolFailed, ToolMissing

_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Result:
    """What a program did: exit status (negative: killed by that signal), output, seconds it ran."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    duration_s: float

    def check(self) -> Result:
        """Return self, or raise ToolFailed when the status is not 0."""
        if self.status != 0:
            text = (self.stderr.strip() or self.stdout.strip())[-_TAIL_CHARS:]
            raise ToolFailed(argv0=" ".join(self.argv[:3]), status=self.status, duration_s=self.duration_s, stderr=text)
        return self


def run(
    argv: Sequence[str],
    *,
    stdin: str = "",
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Result:
    """Run a program to its end and return what it did; raise ToolMissing when it is not there.

    A program that runs longer than timeout_s is killed and has status -9.
    """
    start = time.monotonic()
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=None if env is None else dict(env),
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError:
        raise ToolMissing(tool=argv[0]) from None
    except subprocess.TimeoutExpired:
        return Result(tuple(argv), -signal.SIGKILL, "", f"killed after {timeout_s} s", time.monotonic() - start)
    return Result(tuple(argv), done.returncode, done.stdout, done.stderr, time.monotonic() - start)


async def run_async(
    argv: Sequence[str],
    *,
    stdin: str = "",
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Result:
    """As `run`, without blocking the event loop; cancelling it kills the program."""
    start = time.monotonic()
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
        )
    except FileNotFoundError:
        raise ToolMissing(tool=argv[0]) from None
    try:
        out, err = await asyncio.wait_for(child.communicate(stdin.encode()), timeout_s)
        status, extra = child.returncode, ""
    except TimeoutError:
        out, err, status, extra = b"", b"", -signal.SIGKILL, f"killed after {timeout_s} s"
    finally:
        await end(child)
    assert status is not None
    return Result(
        tuple(argv),
        status,
        out.decode(errors="replace"),
        err.decode(errors="replace") + extra,
        time.monotonic() - start,
    )


async def end(child: asyncio.subprocess.Process, patience_s: float = 0.0) -> None:
    """Wait patience_s for a program to end by itself, then kill it, and wait for its end."""
    if child.returncode is None:
        try:
            await asyncio.wait_for(child.wait(), patience_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                child.kill()
    await child.wait()


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A small environment for helpers of root: nothing of a job's or a caller's reaches them."""
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    for name in ("SLURM_CONF", "PYTHONPATH"):
        if name in os.environ:
            env[name] = os.environ[name]
    return env | dict(extra or {})


def find_program(name: str) -> str:
    """Path of a program on root's own PATH, whatever the caller's is; raise ToolMissing."""
    found = shutil.which(name, path=clean_env()["PATH"])
    if found is None:
        raise ToolMissing(tool=name)
    return found
