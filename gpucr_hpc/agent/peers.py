"""Agents among themselves: requests over TLS 1.3 in which both ends prove that they hold the cluster's signing key.

The certificate is made from that key and from nothing else, so every agent makes the same one, trusts only it, and
no clock, no file and no authority is needed. One connection carries the requests of one operation, one after
another; its end tells the other side that the operation is over, wherever it stood. How requests and answers travel:
agent/connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gpucr_hpc import errors
from gpucr_hpc.agent.connection import VERSION, Connection, Message, OtherVersion
from gpucr_hpc.errors import CoordinationError, GpucrError, PeerLost, PeerVersion
from gpucr_hpc.image.keys import SigningKey
from gpucr_hpc.log import Log

log = Log(__name__)

_CONNECT_LIMIT_S = 10.0
# While an agent works at a request it says so now and then: one that hangs is told from one that has much to do.
ALIVE_S, SILENCE_S = 3.0, 20.0
_ALIVE = {"alive": True}
_NAME = "gpucr-agent"

Request = dict[str, Any]


def certificate(key: SigningKey) -> tuple[bytes, bytes]:
    """The cluster's certificate and private key as PEM; equal for equal keys."""
    private = key.private_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(private, None)
    )
    return built.public_bytes(Encoding.PEM), private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def tls_context(key: SigningKey, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 that accepts exactly the holders of the cluster's key, in both directions."""
    public, private = certificate(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=public.decode())
    # The ssl module reads private keys from files only: one that has no name in any directory.
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:  # noqa: S108
        file.write(public + private)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    if server:
        context.num_tickets = 0  # nobody resumes a session, and they would come with the first answer
    return context


class Session:
    """The server's side of one operation: its methods are the requests, `close` undoes what is not finished.

    interruptible: requests that are given up when the connection ends; others are carried to their end first.
    """

    interruptible: frozenset[str] = frozenset()

    async def request(self, verb: str, fields: Request) -> Any:
        """Carry out a request and return its answer, JSON values only."""
        method = getattr(self, f"do_{verb}", None)
        if method is None:
            raise CoordinationError(job=fields.get("job", "?"), reason=f"unknown request {verb!r}")
        return await method(**fields)

    async def close(self) -> None:
        """The connection ended."""


async def serve(address: str, port: int, key: SigningKey, session: Callable[[], Session]) -> asyncio.Server:
    """Listen for other agents."""
    running: set[asyncio.Task[None]] = set()  # the event loop alone does not keep them

    def connected() -> _Served:
        return _Served(session, running)

    context = tls_context(key, server=True)
    return await asyncio.get_running_loop().create_server(connected, address, port, ssl=context, backlog=512)


class _Served(Connection):
    """The server's side of one connection: answers one request after another, in one task.

    The connection's end is noticed also while a request is carried out.
    """

    def __init__(self, session: Callable[[], Session], running: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self._make, self._running = session, running
        self._next: Message | None = None
        self._coming: asyncio.Future[None] | None = None
        self._at_work: str | None = None
        self._sign: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._session = self._make()
        self._task = asyncio.ensure_future(self._serve())
        self._running.add(self._task)
        self._task.add_done_callback(self._running.discard)

    async def _serve(self) -> None:
        try:
            while (message := await self._request()) is not None:
                self._at_work = str(message.get("do"))
                if self._given_up:
                    return
                if self._sign is None:
                    self._sign = asyncio.get_running_loop().call_later(ALIVE_S, self._say_alive)
                answer = await _answer(self._session, message)
                self._at_work = None
                self.send(answer)
        finally:
            self._at_work = None
            self.close()
            await asyncio.shield(self._close_session())

    async def _close_session(self) -> None:
        try:
            await self._session.close()
        except Exception as error:
            log.error("operation not undone", node=self.peer, error=repr(error))

    async def _request(self) -> Message | None:
        """The next request, None at the end of the connection."""
        if self._next is None and not self._ended:
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming
        message, self._next = self._next, None
        return message

    @property
    def _given_up(self) -> bool:
        """Nobody waits for the answer any more, and what is asked for may be left half done."""
        return self._ended and self._at_work in self._session.interruptible

    def _say_alive(self) -> None:
        """Never later than ALIVE_S after a request was begun; one timer serves many short ones."""
        self._sign = None
        if self._at_work is not None and not self._ended:
            self.send(_ALIVE)
            self._sign = asyncio.get_running_loop().call_later(ALIVE_S, self._say_alive)

    def heard(self, message: Message) -> None:
        if self._at_work is not None or self._next is not None:
            raise ConnectionError("a request came before the answer to the last one")
        self._next = message
        self._wake()

    def ended(self, error: Exception | None) -> None:
        if isinstance(error, OtherVersion):
            log.warning("an agent of another version is not heard", node=self.peer, version=error.version)
            self.send({})  # who reads it finds our version
        elif error is not None:
            log.warning("agent connection broken", node=self.peer, error=repr(error))
        if self._sign is not None:
            self._sign.cancel()
        if self._given_up:
            self._task.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)


async def _answer(session: Session, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": await session.request(str(message["do"]), message["fields"])}
    except GpucrError as error:
        # Numbers stay numbers: some sentences round them.
        fields = {k: v if isinstance(v, int | float) else str(v) for k, v in error.fields.items()}
        return {"error": {"id": type(error).__name__, "fields": fields}}
    except Exception as error:
        log.exception("request failed")
        return {"error": {"id": "GpucrError", "fields": {"reason": repr(error)}}}


class Peer(Connection):
    """The client's side of one operation with one other agent."""

    def __init__(self, job: str, node: str) -> None:
        super().__init__()
        self._job, self._node = job, node
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[Message] | None = None  # while a call waits for it
        self._lost: GpucrError | None = None  # why no call is answered any more
        self._last_word = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def call(self, verb: str, **fields: Any) -> Any:
        """Make a request; raise the other side's error, PeerVersion, or PeerLost when it does not answer any more.

        A call that is cancelled ends the connection: the next answer would be taken for that of another request.
        """
        async with self._turn:
            if self._lost is not None:
                raise self._lost
            loop = asyncio.get_running_loop()
            self._answer, self._last_word = loop.create_future(), loop.time()
            if self._watch is None:
                self._watch = loop.call_later(SILENCE_S, self._look)
            self.send({"do": verb, "fields": fields})
            try:
                answer = await self._answer
            except asyncio.CancelledError:
                self._lose("an earlier request was cut off")
                self.close()
                raise
            finally:
                self._answer = None
        if "error" in answer:
            kind = getattr(errors, answer["error"]["id"], GpucrError)
            raise kind(**answer["error"]["fields"])
        return answer["ok"]

    def _lose(self, reason: object) -> None:
        if self._lost is None:
            self._lost = PeerLost(job=self._job, node=self._node, reason=reason)

    def _look(self) -> None:
        """Whether there was a word within SILENCE_S; one timer serves many short calls."""
        self._watch = None
        if self._answer is None or self._ended:
            return
        loop = asyncio.get_running_loop()
        left_s = self._last_word + SILENCE_S - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._look)
            return
        self._lose(f"it does not say a word for {SILENCE_S:.0f} s")
        self._fail()
        self.close()

    def _fail(self) -> None:
        if self._answer is not None and not self._answer.done():
            assert self._lost is not None
            self._answer.set_exception(self._lost)

    def heard(self, message: Message) -> None:
        if self._answer is None:
            raise ConnectionError("an answer came to no request")
        self._last_word = asyncio.get_running_loop().time()
        if message != _ALIVE and not self._answer.done():
            self._answer.set_result(message)

    def ended(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if isinstance(error, OtherVersion) and self._lost is None:
            self._lost = PeerVersion(node=self._node, theirs=error.version, ours=VERSION)
        self._lose("it closed the connection" if error is None else error)
        self._fail()

    async def end(self, verb: str, limit_s: float, **fields: Any) -> None:
        """Make the last request and close; must not raise. A node that does not answer sees the connection's end."""
        try:
            await asyncio.wait_for(self.call(verb, **fields), limit_s)
        except (GpucrError, TimeoutError) as error:
            why = str(error) or f"no answer within {limit_s:.0f} s"
            log.warning("a node was not told of the end", job=self._job, node=self._node, order=verb, error=why)
        self.close()


class Connector:
    """Opens connections to other agents; keeps the TLS context, which takes milliseconds to make."""

    def __init__(self, key: SigningKey, port: int) -> None:
        self._context, self._port = tls_context(key, server=False), port
        self._ready: dict[str, dict[str, Peer]] = {}  # job to node

    async def open(self, job: str, node: str, address: str) -> Peer:
        """Connect to the agent of a node; raise PeerLost."""
        try:
            opening = asyncio.get_running_loop().create_connection(
                lambda: Peer(job, node), address, self._port, ssl=self._context, server_hostname=_NAME
            )
            _, peer = await asyncio.wait_for(opening, _CONNECT_LIMIT_S)
        except (OSError, ssl.SSLError, TimeoutError) as error:
            raise PeerLost(job=job, node=node, reason=str(error) or type(error).__name__) from None
        return peer

    async def keep_ready(self, job: str, nodes: Sequence[tuple[str, str]]) -> None:
        """Hold a connection to each of these nodes, (name, address), for the job's next operation, until `forget`.

        The handshakes with a thousand nodes take longer than all other messages of a checkpoint. A node that cannot be
        reached now is left out.
        """
        waiting = self._ready.setdefault(job, {})

        async def one(node: str, address: str) -> None:
            with contextlib.suppress(PeerLost):
                peer = await self.open(job, node, address)
                if self._ready.get(job) is waiting and node not in waiting:
                    waiting[node] = peer
                else:
                    peer.close()

        await asyncio.gather(*(one(*node) for node in nodes if node[0] not in waiting))

    def forget(self, job: str) -> None:
        """Close what is held for a job that has ended or left."""
        for peer in self._ready.pop(job, {}).values():
            peer.close()

    async def open_all(self, job: str, nodes: Sequence[tuple[str, str]]) -> list[Peer]:
        """A connection to each of these nodes: one that is held, or a new one. Raises PeerLost, with none left open."""
        waiting = self._ready.get(job, {})

        async def one(node: str, address: str) -> Peer:
            peer = waiting.pop(node, None)
            if peer is not None and peer.alive:
                return peer
            return await self.open(job, node, address)

        done = await asyncio.gather(*(one(*node) for node in nodes), return_exceptions=True)
        lost = next((result for result in done if isinstance(result, BaseException)), None)
        opened = [result for result in done if isinstance(result, Peer)]
        if lost is not None:
            for peer in opened:
                peer.close()
            raise lost
        return opened

    @contextlib.asynccontextmanager
    async def to(self, job: str, node: str, address: str) -> AsyncIterator[Peer]:
        """A connection for the length of a block."""
        peer = await self.open(job, node, address)
        try:
            yield peer
        finally:
            peer.close()


async def each(work: Callable[[int], Awaitable[Any]], ranks: list[int]) -> list[Any]:
    """Do something for several node ranks at once; all are waited for, then the first error is raised."""
    done = await asyncio.gather(*(work(rank) for rank in ranks), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return done
