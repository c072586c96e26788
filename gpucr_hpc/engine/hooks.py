"""The agent's side of CRIU's action script at a restore: something done while the tree stands still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from gpucr_hpc import wire
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.log import Log

SOCKET = "hook.sock"
log = Log(__name__)


@contextlib.asynccontextmanager
async def serve(directory: Path, uid: int, action: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[Path]:
    """Answer hooks on a socket in a directory for the length of a block: `work` is done at `action`, and its failure
    makes CRIU give up; at every other action CRIU just goes on. uid: whose hooks are heard, besides root's."""
    path = directory / SOCKET
    path.unlink(missing_ok=True)

    async def heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = wire.Channel(reader, writer)
        status = 1
        try:
            frame = await channel.receive()
            if frame is None or frame.type is not wire.Type.HOOK or channel.peer.uid not in (0, uid):
                return
            if frame.get("ACTION") == action:
                await work()
            status = 0
        except (GpucrError, OSError) as error:
            log.error("hook failed", action=action, error=str(error))
        finally:
            with contextlib.suppress(GpucrError, OSError):
                await channel.send(wire.make(wire.Type.HOOKRESULT, STATUS=status))
            channel.close()

    server = await asyncio.start_unix_server(wire.ends_quietly(heard), str(path))
    path.chmod(0o666)  # the hook has the user's real id, and a shell between may drop the effective one
    try:
        yield path
    finally:
        server.close()
        path.unlink(missing_ok=True)
