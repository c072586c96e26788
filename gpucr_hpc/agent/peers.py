"""Agents among themselves: requests over TLS 1.3 in which both ends prove that they hold the cluster's signing key.

The certificate is made from that key and from nothing else, so every agent makes the same one, trusts only it, and
no clock, no file and no authority is needed. One connection carries the requests of one operation, one after
another; its end tells the other side that the operation is over, wherever it stood.

A message is its length (u32, little endian) and a JSON object. `version` in each is that of all that agents say to each
other; who reads another one than its own acts on nothing of it. Length, JSON and `version` are in every version.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import json
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gpucr_hpc import errors, wire
from gpucr_hpc.errors import CoordinationError, GpucrError, PeerLost, PeerVersion
from gpucr_hpc.image.keys import SigningKey
from gpucr_hpc.log import Log

log = Log(__name__)

#: Raised when an agent of before would misunderstand a request or an answer, or miss something in it.
VERSION = 1
_MAX_MESSAGE_BYTES = 64 << 20
_CONNECT_LIMIT_S = 10.0
_PROBE_AFTER_S, _PROBES = 4, 3  # a peer that is silent for 16 s is gone: well within Slurm's KillWait of 30 s
# While an agent works at a request it says so now and then: one that hangs is told from one that has much to do.
ALIVE_S, SILENCE_S = 3.0, 20.0
_ALIVE = {"alive": True}
_NAME = "gpucr-agent"
# asyncio gives each connection a buffer of this size for what it has decrypted; its own 256 KiB for each of a thousand
# nodes are 256 MiB that must be cleared first.
asyncio.sslproto.SSLProtocol.max_size = 16 << 10

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
    return built.public_bytes(Encoding.PEM), private.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


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
    return context


class _OtherVersion(Exception):
    """A message of an agent that speaks another version."""

    def __init__(self, version: object) -> None:
        super().__init__(f"version {version}")
        self.version = version


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    data = json.dumps(message | {"version": VERSION}).encode()
    writer.write(struct.pack("<I", len(data)) + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message without its version, None at the end of the connection."""
    try:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionError(f"message of {length} bytes")
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    if (version := message.pop("version", 0)) != VERSION:
        raise _OtherVersion(version)
    return message


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

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = session()
        _notice_dead_peer(writer)
        try:
            await _serve(current, reader, writer)
        except _OtherVersion as other:
            log.warning("an agent of another version is not heard", node=_from(writer), version=other.version)
            with contextlib.suppress(OSError, ssl.SSLError):
                await _send(writer, {})  # who reads it finds our version
        except (OSError, ssl.SSLError, ValueError) as error:
            log.warning("agent connection broken", error=repr(error))
        finally:
            writer.close()
            await asyncio.shield(current.close())

    context = tls_context(key, server=True)
    return await asyncio.start_server(wire.ends_quietly(handle), address, port, ssl=context, backlog=512)


async def _serve(session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request after another. The connection's end is noticed also while one is being carried out."""
    following = asyncio.ensure_future(_receive(reader))
    try:
        while (message := await following) is not None:
            following = asyncio.ensure_future(_receive(reader))
            work = asyncio.ensure_future(_answer(session, message))
            try:
                either = {work, following}
                while not (await asyncio.wait(either, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    await _send(writer, _ALIVE)
                if not work.done() and message["do"] in session.interruptible:
                    return  # nobody asks for more before the answer: it is the end
                await _send(writer, await work)
            finally:
                work.cancel()
                await asyncio.wait({work})
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _from(writer: asyncio.StreamWriter) -> str:
    """Address of the other side."""
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "?"


def _notice_dead_peer(writer: asyncio.StreamWriter) -> None:
    """A node that lost power or its network ends no connection: without this its peers would wait for ever."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _PROBE_AFTER_S * (_PROBES + 1))


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


class Peer:
    """The client's side of one operation with one other agent."""

    def __init__(self, job: str, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._job, self._node, self._reader, self._writer = job, node, reader, writer
        self._turn = asyncio.Lock()
        self._cut_off = False

    async def call(self, verb: str, **fields: Any) -> Any:
        """Make a request; raise the other side's error, PeerVersion, or PeerLost when it does not answer any more.

        A call that is cancelled ends the connection: the next answer would be taken for that of another request.
        """
        if self._cut_off:
            raise PeerLost(job=self._job, node=self._node, reason="an earlier request was cut off")
        try:
            async with self._turn:
                await _send(self._writer, {"do": verb, "fields": fields})
                answer: dict[str, Any] | None = _ALIVE
                while answer == _ALIVE:
                    answer = await asyncio.wait_for(_receive(self._reader), SILENCE_S)
        except TimeoutError:
            self._cut_off = True
            self.close()
            reason = f"it does not say a word for {SILENCE_S:.0f} s"
            raise PeerLost(job=self._job, node=self._node, reason=reason) from None
        except asyncio.CancelledError:
            self._cut_off = True
            self.close()
            raise
        except _OtherVersion as other:
            raise PeerVersion(node=self._node, theirs=other.version, ours=VERSION) from None
        except (OSError, ssl.SSLError) as error:
            raise PeerLost(job=self._job, node=self._node, reason=error) from None
        if answer is None:
            raise PeerLost(job=self._job, node=self._node, reason=f"it closed the connection during {verb!r}")
        if "error" in answer:
            kind = getattr(errors, answer["error"]["id"], GpucrError)
            raise kind(**answer["error"]["fields"])
        return answer["ok"]

    @property
    def alive(self) -> bool:
        """Whether the other side has not ended the connection, as far as is known here."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def end(self, verb: str, limit_s: float, **fields: Any) -> None:
        """Make the last request and close; must not raise. A node that does not answer sees the connection's end."""
        try:
            await asyncio.wait_for(self.call(verb, **fields), limit_s)
        except (GpucrError, TimeoutError) as error:
            why = str(error) or f"no answer within {limit_s:.0f} s"
            log.warning("a node was not told of the end", job=self._job, node=self._node, order=verb, error=why)
        self.close()

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Wait until the connection is closed, by whichever side."""
        with contextlib.suppress(OSError, ssl.SSLError):
            await self._writer.wait_closed()


class Connector:
    """Opens connections to other agents; keeps the TLS context, which takes milliseconds to make."""

    def __init__(self, key: SigningKey, port: int) -> None:
        self._context, self._port = tls_context(key, server=False), port
        self._ready: dict[str, dict[str, Peer]] = {}  # job to node

    async def open(self, job: str, node: str, address: str) -> Peer:
        """Connect to the agent of a node; raise PeerLost."""
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address, self._port, ssl=self._context, server_hostname=_NAME),
                _CONNECT_LIMIT_S,
            )
        except (OSError, ssl.SSLError, TimeoutError) as error:
            raise PeerLost(job=job, node=node, reason=str(error) or type(error).__name__) from None
        _notice_dead_peer(writer)
        return Peer(job, node, reader, writer)

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
