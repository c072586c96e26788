"""The agent's orderly end: nothing that runs in it is left half-way."""

from __future__ import annotations

import asyncio

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import daemon, metrics, peers
from gpucr_hpc.image.keys import SigningKey

KEY = SigningKey(bytes(range(32)))


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
        await daemon.end_tasks()

    begun: list[asyncio.Task[None]] = []
    asyncio.run(agent())
    assert ended == [3, 2, 1, 0]
    assert all(task.cancelled() for task in begun)
    assert complaints == []


@pytest.mark.parametrize("kind", ["agents", "programs", "figures"])
def test_open_connections_end_without_a_word(kind, tmp_path):
    """Connections that are open when the agent ends are no errors; asyncio of Python 3.11 takes them for such."""
    complaints, served = [], []

    async def idle(channel: wire.Channel) -> None:
        served.append(channel)
        await channel.receive()

    class Idle(peers.Session):
        async def do_nothing(self) -> None:
            served.append(self)
            await asyncio.Event().wait()

    async def agent() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        if kind == "agents":
            server = await peers.serve("127.0.0.1", 0, KEY, Idle)
            peer = await peers.Connector(KEY, port_of(server)).open("7", "n2", "127.0.0.1")
            call = asyncio.ensure_future(peer.call("nothing"))
        elif kind == "programs":
            server = await daemon.listen(tmp_path / "socket", daemon.guarded(idle))
            _, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        else:
            server = await metrics.serve(0, lambda: "")
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            writer.write(b"GET")
            served.append(writer)
        while not served:
            await asyncio.sleep(0)
        server.close()
        await daemon.end_tasks()
        if kind == "agents":
            assert call.cancelled()
        else:
            writer.close()

    asyncio.run(agent())
    assert complaints == []


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
