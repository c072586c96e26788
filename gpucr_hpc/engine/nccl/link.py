"""One process's helper thread, over its Unix socket in the capsule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

from gpucr_hpc import wire
from gpucr_hpc.errors import NcclFailed

Pairs = Iterable[tuple[str, str]]

_LIMIT_S = 10.0
FOLDER = "dev/shm"


def socket_path(pid: int, nspid: int) -> Path:
    """Where the helper of a process listens, seen from the host."""
    return Path(f"/proc/{pid}/root/{FOLDER}/gpucr-nccl.{nspid}")


def _retrieve(task: asyncio.Future[wire.Frame]) -> None:
    if not task.cancelled():
        task.exception()


class Link:
    """Frames NCCL and NCCLSTATE (docs/protocol.md). pid: on the host, for messages.

    Its end before the process has drained its GPU lets the process go on.
    """

    def __init__(self, pid: int, channel: wire.Channel) -> None:
        self.pid, self._channel, self._turn = pid, channel, asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path, pid: int, uid: int) -> Link:
        """Raises NcclFailed when nobody listens there, or another than this user."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                channel = await wire.connect(str(path))
        except (OSError, TimeoutError) as error:
            raise NcclFailed(pid=pid, reason=f"its helper thread cannot be reached: {error}") from None
        # The kernel names who has called listen(2): after a restore that was CRIU, as root.
        if channel.peer.uid not in (uid, 0):
            channel.close()
            raise NcclFailed(pid=pid, reason=f"user {channel.peer.uid} listens at its socket")
        return cls(pid, channel)

    async def order(self, word: str, pairs: Pairs = ()) -> wire.Frame:
        """Give an order and get the process's report; NcclFailed when it refuses or does not answer."""
        # One that is cut off is still heard to its end, so that the next one gets its own answer.
        task = asyncio.ensure_future(self._exchange(wire.Frame(wire.Type.NCCL, (("DO", word), *pairs))))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _exchange(self, order: wire.Frame) -> wire.Frame:
        word = order.get("DO")
        try:
            async with self._turn, asyncio.timeout(_LIMIT_S):
                await self._channel.send(order)
                answer = await self._channel.receive()
        except (OSError, TimeoutError) as error:
            raise NcclFailed(pid=self.pid, reason=f"no answer to {word}: {error!r}") from None
        if answer is None:
            raise NcclFailed(pid=self.pid, reason=f"it ended at {word}")
        if answer.get("REFUSED"):
            raise NcclFailed(pid=self.pid, reason=f"it refused: {answer.get('REFUSED')}")
        return answer

    async def leave(self) -> None:
        """End the connection, and wait until the process has closed its end, too: a dump must not find it."""
        with contextlib.suppress(OSError, TimeoutError):
            async with self._turn, asyncio.timeout(_LIMIT_S):
                await self._channel.end()
        self.close()

    def close(self) -> None:
        self._channel.close()
