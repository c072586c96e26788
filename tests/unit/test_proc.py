"""Programs and their ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time

from gpucr_hpc import proc


def test_a_program_that_ends_as_its_time_is_up_is_no_error():
    """Its end and the end of the patience are seen in the same turn of the event loop: nothing is left to kill."""

    async def run() -> int | None:
        child = await asyncio.create_subprocess_exec("sleep", "60")
        ended = os.pidfd_open(child.pid)
        ending = asyncio.ensure_future(proc.end(child, 0.05))
        for _ in range(5):  # turns of the loop in which it begins to wait
            await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGTERM)
        select.select([ended], [], [])
        time.sleep(0.1)  # holds the loop until both are due
        await ending
        os.close(ended)
        return child.returncode

    assert -signal.SIGTERM == asyncio.run(run())


def test_a_program_that_does_not_end_is_killed():
    """Patience has an end."""

    async def run() -> int | None:
        child = await asyncio.create_subprocess_exec("sleep", "60")
        await proc.end(child, 0.01)
        return child.returncode

    assert -signal.SIGKILL == asyncio.run(run())
