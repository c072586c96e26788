"""One process's helper thread, over its Unix socket in the capsule."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from gpucr_hpc import wire
from gpucr_hpc.engine.nccl.report import Report, Targets, parse
from gpucr_hpc.errors import NcclFailed

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

    Closing it before `destroy` lets the process go on.
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
        if channel.peer.uid != uid:
            channel.close()
            raise NcclFailed(pid=pid, reason=f"user {channel.peer.uid} listens at its socket")
        return cls(pid, channel)

    async def _order(self, word: str, *lists: tuple[str, Iterable[str]], **fields: object) -> wire.Frame:
        # One that is cut off is still heard to its end, so that the next one gets its own answer.
        task = asyncio.ensure_future(self._exchange(word, *lists, **fields))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _exchange(self, word: str, *lists: tuple[str, Iterable[str]], **fields: object) -> wire.Frame:
        try:
            async with self._turn, asyncio.timeout(_LIMIT_S):
                await self._channel.send(wire.make(wire.Type.NCCL, *lists, DO=word, **fields))
                answer = await self._channel.receive()
        except (OSError, TimeoutError) as error:
            raise NcclFailed(pid=self.pid, reason=f"no answer to {word}: {error!r}") from None
        if answer is None:
            raise NcclFailed(pid=self.pid, reason=f"it ended at {word}")
        if answer.get("REFUSED"):
            raise NcclFailed(pid=self.pid, reason=f"it refused: {answer.get('REFUSED')}")
        return answer

    async def ask(self) -> Report:
        return parse(await self._order("ask"))

    async def cut(self) -> Report:
        """Close the gate."""
        return parse(await self._order("cut"))

    async def target(self, targets: Targets, version: int) -> Report:
        """Tell how far to go, and get what the process has reached."""
        return parse(
            await self._order(
                "target",
                ("TARGET", (f"{gid} {count}" for gid, count in targets.collectives.items())),
                ("PAIR", (f"{g} {a} {b} {count}" for (g, a, b), count in targets.pairs.items())),
                VERSION=version,
                FREE=int(targets.free),
            )
        )

    async def drain(self) -> None:
        await self._order("drain")

    async def destroy(self) -> None:
        await self._order("destroy")

    async def new_ids(self, gids: Iterable[str]) -> dict[str, str]:
        """A new id, in hex, for each communicator named; this process listens for the other ranks then."""
        answer = await self._order("ids", ("GID", gids))
        return dict(text.split() for text in answer.all("ID"))

    async def rebuild(self, ids: dict[str, str]) -> None:
        await self._order("rebuild", ("ID", (f"{gid} {text}" for gid, text in ids.items())))

    async def open(self, *, lost: bool = False) -> None:
        """Let the program go on. lost: also without the communicators that could not be made again."""
        await self._order("open", LOST=int(lost))

    async def settle(self, wanted: str, limit_s: float) -> None:
        """Wait for the end of a long action; NcclFailed with the process's reason, or for the time."""
        pause, deadline = 0.001, asyncio.get_running_loop().time() + limit_s
        while True:
            report = await self.ask()
            if report.state == wanted:
                return
            if report.state in ("failed", "open"):
                raise NcclFailed(pid=self.pid, reason=report.why or f"it is {report.state}, not {wanted}")
            if asyncio.get_running_loop().time() > deadline:
                raise NcclFailed(pid=self.pid, reason=f"still {report.state} after {limit_s:g} s, not {wanted}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)

    def close(self) -> None:
        self._channel.close()


def helpers(processes: Iterable[tuple[int, int]]) -> list[tuple[int, Path]]:
    """Those of (pid, nspid) that have begun to use NCCL under the interposer, with their sockets."""
    found = [(pid, socket_path(pid, nspid)) for pid, nspid in processes]
    return [(pid, path) for pid, path in found if os.path.exists(path)]
