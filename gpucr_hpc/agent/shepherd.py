"""Orders to a capsule's shepherd."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpucr_hpc import wire
from gpucr_hpc.errors import CapsuleError

_LIMIT_S = 10.0


@dataclass(frozen=True)
class Task:
    """A task of the shepherd: its key, pid inside the namespace, and wait(2) status when it has ended."""

    key: str
    pid: int
    status: int | None


async def detach(job: str, node: str, path: str) -> list[Task]:
    """Have the shepherd write out what it holds and close every descriptor that leads out of the capsule.

    Its supervisors are told and wait for our word. Raises CapsuleError when it does not obey.
    """
    try:
        async with asyncio.timeout(_LIMIT_S):
            channel = await wire.connect(path)
            await channel.send(wire.make(wire.Type.DETACH))
            answer = await channel.receive()
            if answer is None or answer.type is not wire.Type.DETACHED:
                raise CapsuleError(job=job, node=node, reason="the shepherd did not detach")
            while await channel.receive() is not None:  # until it has closed its end: nothing may be in flight
                pass
            channel.close()
    except (OSError, TimeoutError) as error:
        raise CapsuleError(job=job, node=node, reason=f"the shepherd does not answer: {error!r}") from None
    return [_task(text) for text in answer.all("TASKS")]


def _task(text: str) -> Task:
    key, pid, _pmi, state = text.split(":", 3)
    return Task(key, int(pid), int(state.removeprefix("exited:")) if state.startswith("exited:") else None)
