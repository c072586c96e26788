"""The agent's side of a worker: start it, give it orders, end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucr_hpc import errors, proc
from gpucr_hpc.errors import GpucrError, HostError
from gpucr_hpc.wire import receive_record, send_record


class WorkerClient:
    """One worker process. Use as an async context manager; leaving it ends the worker.

    Orders are given one after another. Errors of the worker are raised here with their own class.
    """

    def __init__(self, root: str, uid: int, gid: int) -> None:
        self._root, self._uid, self._gid = root, uid, gid
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return None if self._process is None else self._process.pid

    @classmethod
    def for_user(cls, root: str, user: str) -> WorkerClient:
        """A worker that writes as an account; raise HostError when there is no such account."""
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise HostError(reason=f"store.user: no account {user!r} on this node") from None
        return cls(root, entry.pw_uid, entry.pw_gid)

    async def start(self, listen: Path | None = None, name: str = "", *, expendable: bool = False) -> WorkerClient:
        """Start the process and open the store; with `listen`, bind CRIU's socket `name` there first. expendable: when
        memory is short it is the first to go."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpucr_hpc.engine.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=proc.clean_env(),
                start_new_session=True,
            )
        self._control = ours
        await self.call(
            "open",
            root=self._root,
            uid=self._uid,
            gid=self._gid,
            listen=None if listen is None else str(listen),
            name=name,
            expendable=expendable,
        )
        return self

    async def __aenter__(self) -> WorkerClient:
        if self._process is None:
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, verb: str, fds: Sequence[int] = (), **fields: Any) -> Any:
        """Give an order and wait for its answer; HostError when the worker is gone."""
        async with self._turn:
            return await asyncio.to_thread(self._call, verb, fds, fields)

    def _call(self, verb: str, fds: Sequence[int], fields: dict[str, Any]) -> Any:
        assert self._control is not None
        try:
            send_record(self._control, json.dumps({"do": verb, **fields}).encode(), fds)
            received = receive_record(self._control)
        except OSError as error:
            raise HostError(reason=f"the store worker is gone: {error.strerror}") from None
        if received is None:
            raise HostError(reason=f"the store worker died during {verb!r}")
        answer = json.loads(received[0])
        if "error" in answer:
            raise _rebuild(answer["error"])
        return answer["ok"]

    async def abandon(self) -> None:
        """End the worker at once, even in the middle of an order; CRIU then loses its stream and undoes."""
        await self.close(patience_s=1.0)

    async def close(self, patience_s: float = 20.0) -> None:
        """End the worker; whatever it had not published is removed by it, or by the next one of the job."""
        if self._control is not None:
            # Wake a thread that still waits for an answer; closing alone would leave it there.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        if self._process is not None:
            await proc.end(self._process, patience_s)
            self._process = None


def _rebuild(error: dict[str, Any]) -> GpucrError:
    kind = getattr(errors, error["id"], GpucrError)
    built: GpucrError = kind(**error["fields"])
    return built


def pipe() -> tuple[int, int]:
    """Read and write end of a pipe, close-on-exec."""
    return os.pipe2(os.O_CLOEXEC)
