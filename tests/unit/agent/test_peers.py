"""Agents among themselves: requests, errors, and connections that end or are cut off in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import ssl
import string
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gpucr_hpc import errors
from gpucr_hpc.agent import peers
from gpucr_hpc.agent.peers import Connector, Peer, Session
from gpucr_hpc.errors import GpucrError, PeerLost, PeerVersion, StoreFull
from gpucr_hpc.image.keys import SigningKey

KEY, FOREIGN = SigningKey(bytes(range(32))), SigningKey(bytes(32))


def kinds() -> list[type[GpucrError]]:
    """Every error that is made of its fields alone."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GpucrError)]
    return [kind for kind in found if "__init__" not in vars(kind) or kind is GpucrError]


class Recorder(Session):
    """Writes down what happens to it; `hold` keeps its slow requests from ending."""

    interruptible = frozenset({"slow"})

    def __init__(self, journal: list[str], hold: asyncio.Event) -> None:
        self._journal, self._hold = journal, hold

    async def do_echo(self, word: str) -> str:
        return word

    async def do_full(self) -> None:
        raise StoreFull(path="/store", reason="0 bytes free")

    async def do_slow(self) -> None:
        await self._wait("slow")

    async def do_firm(self) -> None:
        await self._wait("firm")

    async def _wait(self, name: str) -> None:
        self._journal.append(f"{name} begins")
        try:
            await self._hold.wait()
        except asyncio.CancelledError:
            self._journal.append(f"{name} given up")
            raise
        self._journal.append(f"{name} done")

    async def close(self) -> None:
        self._journal.append("closed")


@contextlib.asynccontextmanager
async def served(hold: asyncio.Event) -> AsyncIterator[tuple[int, list[str]]]:
    """An agent whose sessions are Recorders: its port and journal."""
    journal: list[str] = []
    server = await peers.serve("127.0.0.1", 0, KEY, lambda: Recorder(journal, hold))
    try:
        yield server.sockets[0].getsockname()[1], journal
    finally:
        server.close()


def held(*, let_go: bool) -> asyncio.Event:
    hold = asyncio.Event()
    if let_go:
        hold.set()
    return hold


def with_peer(case: Callable[[Peer, list[str], asyncio.Event], Awaitable[None]]) -> list[str]:
    """Run a case with one connection; what the server's side wrote down."""

    async def run() -> list[str]:
        hold = held(let_go=False)
        async with served(hold) as (port, journal):
            peer = await Connector(KEY, port).open("7", "n2", "127.0.0.1")
            try:
                await asyncio.wait_for(case(peer, journal, hold), 10)
            finally:
                peer.close()
                hold.set()
                await until(lambda: "closed" in journal)
        return journal

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_answers_and_errors_come_back() -> None:
    """An error of the other side is raised here as the same error."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        assert await peer.call("echo", word="a") == "a"
        with pytest.raises(StoreFull, match="0 bytes free"):
            await peer.call("full")
        assert await peer.call("echo", word="b") == "b"

    assert with_peer(case) == ["closed"]


def test_request_is_given_up_when_the_connection_ends() -> None:
    """A lead that dies in the middle of a node's dump must not leave the tree frozen until the dump is done."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        call = asyncio.ensure_future(peer.call("slow"))
        await until(lambda: "slow begins" in journal)
        peer.close()
        await until(lambda: "closed" in journal)
        assert not hold.is_set()
        await asyncio.gather(call, return_exceptions=True)

    assert with_peer(case) == ["slow begins", "slow given up", "closed"]


def test_other_requests_are_carried_to_their_end() -> None:
    """What has no way back, such as the end of a tree, is not left half done."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        call = asyncio.ensure_future(peer.call("firm"))
        await until(lambda: "firm begins" in journal)
        peer.close()
        hold.set()
        await asyncio.gather(call, return_exceptions=True)

    assert with_peer(case) == ["firm begins", "firm done", "closed"]


def test_an_end_that_fails_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Recorder) -> None:
        self._journal.append("closed")
        raise OSError("no way back")

    monkeypatch.setattr(Recorder, "close", broken)

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        peer.close()

    assert with_peer(case) == ["closed"]
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == ["operation not undone"]


def test_a_call_that_is_cut_off_ends_the_connection() -> None:
    """Its late answer would be taken for that of the next request."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.call("slow"), 0.05)
        with pytest.raises(PeerLost, match="cut off"):
            await peer.call("echo", word="a")
        await until(lambda: "closed" in journal)

    assert with_peer(case) == ["slow begins", "slow given up", "closed"]


@pytest.mark.parametrize(("verb", "did"), [("slow", ["slow begins", "slow given up"]), ("full", [])])
def test_the_last_order_is_given_once_and_ends_the_connection(verb: str, did: list[str]) -> None:
    """Also where it is not carried out, or not in time."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        await peer.end(verb, 0.05)
        await until(lambda: "closed" in journal)
        assert not peer.alive

    assert with_peer(case) == [*did, "closed"]


def test_a_peer_that_works_long_is_waited_for_and_one_that_hangs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come while a request is carried out; without them the peer is lost."""
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        monkeypatch.setattr(peers, "ALIVE_S", 0.02)
        asyncio.get_running_loop().call_later(0.5, hold.set)
        await peer.call("slow")
        hold.clear()
        monkeypatch.setattr(peers, "ALIVE_S", 60)
        with pytest.raises(PeerLost, match="not say a word"):
            await peer.call("slow")
        await until(lambda: "closed" in journal)

    assert with_peer(case) == ["slow begins", "slow done", "slow begins", "slow given up", "closed"]


def test_signs_of_life_are_for_long_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer serves all requests of a connection: after it has run out in vain, the next long one has its signs."""
    monkeypatch.setattr(peers, "ALIVE_S", 0.02)
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        for _ in range(3):
            assert await peer.call("echo", word="a") == "a"
            await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.5, hold.set)
        await peer.call("slow")

    assert with_peer(case) == ["slow begins", "slow done", "closed"]


def test_long_messages_come_whole() -> None:
    """In pieces, both ways."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        word = "\u00fc" * (3 << 20)
        assert await peer.call("echo", word=word) == word
        assert await peer.call("echo", word="a") == "a"

    assert with_peer(case) == ["closed"]


def test_a_silent_peer_is_noticed() -> None:
    """Both ends probe: a node without power sends no end of a connection."""

    async def case(peer: Peer, journal: list[str], hold: asyncio.Event) -> None:
        sock = peer._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000

    with_peer(case)


async def _say_hello(connector: Connector) -> None:
    peer = await connector.open("7", "n2", "127.0.0.1")
    await peer.call("echo", word="a")


def test_a_foreign_key_is_refused() -> None:
    """Only holders of the cluster's key may give orders."""

    async def case() -> None:
        async with served(held(let_go=True)) as (port, _):
            with pytest.raises(PeerLost):
                await _say_hello(Connector(FOREIGN, port))

    asyncio.run(case())


async def answer_to(port: int, message: dict[str, Any]) -> dict[str, Any]:
    """What an agent says to a message of whatever form."""
    context = peers.tls_context(KEY, server=False)
    name = "gpucr-agent"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    data = json.dumps(message).encode()
    writer.write(struct.pack("<I", len(data)) + data)
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    assert await reader.read() == b""
    writer.close()
    return answer


@pytest.mark.parametrize("version", [{}, {"version": peers.VERSION + 1}], ids=["none", "newer"])
def test_a_request_of_another_version_is_not_carried_out(version: dict[str, int]) -> None:
    """The other side learns which version is spoken here, and the connection ends."""

    async def case() -> None:
        async with served(held(let_go=True)) as (port, journal):
            answer = await answer_to(port, {"do": "firm", "fields": {}, **version})
            assert (answer, journal) == ({"version": peers.VERSION}, ["closed"])

    asyncio.run(asyncio.wait_for(case(), 10))


@pytest.mark.parametrize(
    ("sent", "did"),
    [
        (2 * [{"do": "slow", "fields": {}, "version": peers.VERSION}], ["slow begins", "slow given up", "closed"]),
        ([[1]], ["closed"]),
        ([b"\xff{"], ["closed"]),
        ([None], ["closed"]),
    ],
    ids=["too early", "no object", "no text", "too long"],
)
def test_what_no_agent_sends_ends_the_connection(sent: list[Any], did: list[str]) -> None:
    """Of which nothing is kept in memory or left running."""

    async def case() -> None:
        async with served(held(let_go=False)) as (port, journal):
            context, name = peers.tls_context(KEY, server=False), "gpucr-agent"
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
            for number, message in enumerate(sent):
                data = message if isinstance(message, bytes) else json.dumps(message).encode()
                writer.write(struct.pack("<I", len(data) if message is not None else 1 << 31) + data)
                await until(lambda number=number: len(journal) > number)  # type: ignore[misc]
            assert await reader.read() == b""
            await until(lambda: journal == did)
            writer.close()

    asyncio.run(asyncio.wait_for(case(), 10))


def test_an_answer_of_another_version_says_so() -> None:
    """Whatever it says, it is not taken for an answer; the error names node and versions."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        data = json.dumps({"version": 7, "ok": "a"}).encode()
        writer.write(struct.pack("<I", len(data)) + data)
        await writer.drain()

    async def case() -> None:
        server = await asyncio.start_server(other, "127.0.0.1", 0, ssl=peers.tls_context(KEY, server=True))
        peer = await Connector(KEY, server.sockets[0].getsockname()[1]).open("7", "n2", "127.0.0.1")
        with pytest.raises(PeerVersion, match=f"agent on n2 speaks version 7 .* version {peers.VERSION}") as caught:
            await peer.call("echo", word="a")
        assert "same gpucr-hpc" in caught.value.advice()
        peer.close()
        server.close()

    asyncio.run(asyncio.wait_for(case(), 10))


def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    """It would be taken for that of the next request."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = json.dumps({"version": peers.VERSION, "ok": "a"}).encode()
        writer.write(struct.pack("<I", len(data)) + data)
        await reader.read()
        writer.close()

    async def case() -> None:
        server = await asyncio.start_server(other, "127.0.0.1", 0, ssl=peers.tls_context(KEY, server=True))
        peer = await Connector(KEY, server.sockets[0].getsockname()[1]).open("7", "n2", "127.0.0.1")
        await until(lambda: not peer.alive)
        with pytest.raises(PeerLost, match="no request"):
            await peer.call("echo", word="a")
        await peer.closed()
        server.close()

    asyncio.run(asyncio.wait_for(case(), 10))


class Wire:
    """Between a client and an agent: writes down what the client sends; flip: a bit of what follows is changed."""

    def __init__(self, port: int) -> None:
        self._port, self.sent, self.flip = port, b"", False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._copy(reader, forth, note=True), self._copy(back, writer), return_exceptions=True)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, note: bool = False) -> None:
        while data := await source.read(65536):
            if note:
                self.sent += data
                if self.flip:
                    data = data[:-1] + bytes([data[-1] ^ 1])
            target.write(data)
        target.close()


def test_replayed_and_altered_orders_are_not_heard() -> None:
    """Somebody on the network who sends an order once more, or changes a bit of one, orders nothing."""

    async def case() -> None:
        async with served(held(let_go=True)) as (port, journal):
            wire = Wire(port)
            between = await asyncio.start_server(wire.handle, "127.0.0.1", 0)
            connector = Connector(KEY, between.sockets[0].getsockname()[1])
            async with connector.to("7", "n2", "127.0.0.1") as peer:
                await peer.call("firm")
            await until(lambda: "closed" in journal)
            once = list(journal)
            assert "firm done" in once
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(wire.sent)
            answer = await reader.read()  # to the end: the agent closes it
            writer.close()
            assert (b"firm" not in answer, journal) == (True, once)
            async with connector.to("7", "n2", "127.0.0.1") as peer:
                assert await peer.call("echo", word="a") == "a"
                wire.flip = True
                with pytest.raises((PeerLost, ssl.SSLError)):
                    await peer.call("firm")
            await until(lambda: journal.count("closed") == 2)
            assert journal.count("firm begins") == 1
            between.close()

    asyncio.run(asyncio.wait_for(case(), 10))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_is_the_same_sentence_on_the_other_side(kind: type[GpucrError]) -> None:
    """Numbers that a sentence rounds among them: an error that cannot be shown ends a connection instead."""
    template = (kind.__doc__ or "") + kind.hint
    formats = {name: spec for _, name, spec, _ in string.Formatter().parse(template) if name}
    error = kind(**{name: 2.5 if spec else f"the {name}" for name, spec in formats.items()})

    class Failing(Session):
        async def do_fail(self) -> None:
            raise error

    answer = json.loads(json.dumps(asyncio.run(peers._answer(Failing(), {"do": "fail", "fields": {}}))))
    built = getattr(errors, answer["error"]["id"])(**answer["error"]["fields"])
    assert (type(built), str(built), built.advice()) == (kind, str(error), error.advice())
