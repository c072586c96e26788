"""The agent's side of a driver worker: orders with a time limit, after which the worker is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from gpucr_hpc import errors
from gpucr_hpc.errors import CudaHung, GpucrError, HostError
from gpucr_hpc.proc import clean_env

FAKE_VARIABLE = "GPUCR_FAKE_CUDA"  # of the agent, in tests: the directory of a fake driver


def driver_kind(configured: str) -> str:
    """What a worker loads: as configured, or the fake of a test, once its directory is there."""
    fake = os.environ.get(FAKE_VARIABLE, "")
    return f"fake:{fake}" if os.path.isdir(fake) else configured


class CudaWorker:
    """One worker process, started at its first order, started again after it was killed or died."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, for tests that kill it."""
        return None if self._process is None else self._process.pid

    async def _start(self) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpucr_hpc.engine.cuda.worker", str(write), self._kind),
                pass_fds=(write,),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,  # libcuda may print
                env=_env(),
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._answers = asyncio.StreamReader(limit=1 << 20)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._answers or asyncio.StreamReader()), os.fdopen(read, "rb")
        )

    async def call(self, verb: str, limit_s: float, **fields: Any) -> Any:
        """Give an order and wait limit_s for its answer.

        Raises the worker's error, CudaHung (the worker is killed) or HostError (it died). A cancelled call kills the
        worker, too: its answer would be taken for the next one's.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    line = await self._exchange(verb, fields)
            except TimeoutError:
                await self.kill()
                raise CudaHung(pid=fields.get("pid", 0), call=verb, limit_s=round(limit_s, 1)) from None
            except asyncio.CancelledError:
                await asyncio.shield(self.kill())
                raise
            if not line:
                await self.kill()
                raise HostError(reason=f"the GPU driver's worker died during {verb!r}")
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"]["id"], GpucrError)
            error: GpucrError = kind(**answer["error"]["fields"])
            raise error
        return answer["ok"]

    async def _exchange(self, verb: str, fields: dict[str, Any]) -> bytes:
        if self._process is None:
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._answers is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps({"do": verb, **fields}).encode() + b"\n")
            await self._process.stdin.drain()
        return await self._answers.readline()

    async def kill(self) -> None:
        """End the process at once; the driver's call in it, too, as far as the kernel lets it."""
        process, self._process = self._process, None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # one that the kernel cannot end is left to it
                await asyncio.wait_for(process.wait(), 5)

    close = kill


def _env() -> dict[str, str]:
    """As other helpers of root; LD_LIBRARY_PATH of the agent's service stays, some hosts find libcuda by it."""
    env = clean_env()
    for name in ("LD_LIBRARY_PATH", "PATH"):
        if name in os.environ:
            env[name] = f"{env[name]}:{os.environ[name]}" if name in env else os.environ[name]
    return env
