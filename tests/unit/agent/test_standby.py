"""Connections between agents that wait for a job's next operation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from gpucr_hpc.agent import peers
from gpucr_hpc.errors import PeerLost
from gpucr_hpc.image.keys import SigningKey

KEY = SigningKey(b"k" * 32)


class Node(peers.Session):
    """Counts its connections."""

    count = 0

    def __init__(self) -> None:
        Node.count += 1

    async def do_hello(self) -> str:
        return "hello"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run(work: Callable[[peers.Connector, asyncio.Server], Awaitable[None]]) -> None:
    """A connector and the agent of one node."""

    async def both() -> None:
        Node.count, port = 0, free_port()
        server = await peers.serve("127.0.0.1", port, KEY, Node)
        connector = peers.Connector(KEY, port)
        async with server:
            await work(connector, server)
        connector.forget("7")

    asyncio.run(both())


NODES = [("n2", "127.0.0.1")]


def test_a_connection_that_waits_is_taken_once():
    async def work(connector: peers.Connector, _server: asyncio.Server) -> None:
        await connector.keep_ready("7", NODES)
        await connector.keep_ready("7", NODES)
        first, second = [(await connector.open_all("7", NODES))[0] for _ in range(2)]
        assert first is not second
        assert ["hello", "hello"] == [await peer.call("hello") for peer in (first, second)]
        assert 2 == Node.count, "one was held, one is new"
        for peer in (first, second):
            peer.close()
            await peer.closed()

    run(work)


def test_one_that_the_other_side_has_ended_is_not_used():
    """As after a restart of that node's agent."""

    async def work(connector: peers.Connector, _server: asyncio.Server) -> None:
        await connector.keep_ready("7", NODES)
        held = connector._ready["7"]["n2"]
        held.close()
        (peer,) = await connector.open_all("7", NODES)
        assert peer is not held
        assert "hello" == await peer.call("hello")
        peer.close()
        await asyncio.gather(peer.closed(), held.closed())

    run(work)


def test_nothing_is_held_for_a_job_that_has_ended_meanwhile():
    async def work(connector: peers.Connector, _server: asyncio.Server) -> None:
        opening = asyncio.ensure_future(connector.keep_ready("7", NODES))
        await asyncio.sleep(0)
        connector.forget("7")
        await opening
        assert {} == connector._ready

    run(work)


def test_a_node_that_is_not_there_is_left_out_until_it_is_needed():
    async def work(connector: peers.Connector, server: asyncio.Server) -> None:
        server.close()
        await connector.keep_ready("7", NODES)
        assert {"7": {}} == connector._ready
        with pytest.raises(PeerLost, match="n2"):
            await connector.open_all("7", NODES)

    run(work)
