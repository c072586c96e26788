"""The agent's orderly end: nothing that runs in it is left half-way."""

from __future__ import annotations

import asyncio

from gpucr_hpc.agent.daemon import end_tasks


def test_what_is_begun_by_an_end_is_ended_too():
    """A chain of tasks, each begun by the end of the one before."""
    ended, complaints = [], []

    async def link(left: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(left)
            if left:
                begun.append(asyncio.ensure_future(link(left - 1)))

    async def agent() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        begun.append(asyncio.ensure_future(link(3)))
        await asyncio.sleep(0)
        await end_tasks()

    begun: list[asyncio.Task[None]] = []
    asyncio.run(agent())
    assert ended == [3, 2, 1, 0]
    assert all(task.cancelled() for task in begun)
    assert complaints == []
