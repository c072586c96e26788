"""Frames of the local protocol (docs/protocol.md), for the C programs and the agent on one node."""

from __future__ import annotations

import array
import asyncio
import enum
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from gpucr_hpc.errors import HostError

MAGIC = b"GC"
VERSION = 1
HEADER = struct.Struct("<2sHII")
MAX_PAYLOAD_BYTES = 16 << 20
#: Descriptors with one record, at most; the kernel's limit is 253.
MAX_RECORD_FDS = 64

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PeerCredentials = struct.Struct("3i")


class Type(enum.IntEnum):
    """Frame types; docs/protocol.md says who sends which, with what keys."""

    HELLO = 1
    RUN = 2
    REFUSE = 3
    START = 4
    ATTACH = 5
    RELEASE = 6
    OK = 7
    NOTICE = 8
    FORWARD = 9
    ABSORB = 10
    ENDED = 11
    PRINT = 12
    PLACE = 13
    PLACED = 14
    SPAWN = 20
    SPAWNED = 21
    GO = 22
    FAILED = 23
    ATTACHTASK = 24
    ATTACHED = 25
    SIGNAL = 26
    EXITED = 27
    DETACH = 28
    DETACHED = 29
    CONTROL = 30
    SRUN = 31
    PLAN = 32
    OUTPUT = 33
    SRUNEND = 34
    SRUNSIGNAL = 35
    READY = 40
    RESTORE = 41
    RESULT = 42
    ADOPTED = 43
    HOOK = 50
    HOOKRESULT = 51
    NCCL = 60
    NCCLSTATE = 61


class ProtocolError(HostError):
    """local protocol: {reason}"""

    exit_code = 16


@dataclass(frozen=True)
class Frame:
    """One message: its type and its (key, value) pairs in order."""

    type: Type
    pairs: tuple[tuple[str, str], ...] = ()

    def get(self, key: str, default: str = "") -> str:
        """The first value of a key."""
        return next((v for k, v in self.pairs if k == key), default)

    def int(self, key: str, default: int = 0) -> int:
        """The first value of a key as a decimal number; raise ProtocolError when it is none."""
        text = self.get(key, str(default))
        try:
            return int(text)
        except ValueError:
            raise ProtocolError(reason=f"{self.type.name}: {key}={text!r} is not a number") from None

    def all(self, key: str) -> list[str]:
        """Every value of a key, in order."""
        return [v for k, v in self.pairs if k == key]


def make(kind: Type, /, *lists: tuple[str, Iterable[str]], **fields: object) -> Frame:
    """Build a frame from single fields and from (key, values) lists."""
    pairs = [(key, str(value)) for key, value in fields.items()]
    pairs += [(key, value) for key, values in lists for value in values]
    return Frame(kind, tuple(pairs))


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; a NUL byte inside a value is refused."""
    parts = []
    for key, value in frame.pairs:
        if "\0" in value:
            raise ProtocolError(reason=f"{frame.type.name}: NUL byte in {key}")
        parts.append(f"{key}={value}\0".encode(errors="surrogateescape"))
    payload = b"".join(parts)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(reason=f"{frame.type.name}: {len(payload)} bytes are too many")
    return HEADER.pack(MAGIC, VERSION, frame.type, len(payload)) + payload


def parse_header(data: bytes) -> tuple[Type, int]:
    """Type and payload length of a 12-byte header; raise ProtocolError for anything unknown."""
    magic, version, kind, length = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(reason=f"bad magic {magic!r}")
    if version != VERSION:
        raise ProtocolError(reason=f"version {version} is not known (this release speaks {VERSION})")
    if length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(reason=f"payload of {length} bytes")
    try:
        return Type(kind), length
    except ValueError:
        raise ProtocolError(reason=f"unknown type {kind}") from None


def parse_payload(kind: Type, payload: bytes) -> Frame:
    """Frame of a type and its payload."""
    if not payload:
        return Frame(kind)
    if payload[-1]:
        raise ProtocolError(reason=f"{kind.name}: last string is not ended")
    pairs = []
    for item in payload[:-1].split(b"\0"):
        key, equals, value = item.partition(b"=")
        if not equals:
            raise ProtocolError(reason=f"{kind.name}: string without '='")
        pairs.append((key.decode(errors="replace"), value.decode(errors="surrogateescape")))
    return Frame(kind, tuple(pairs))


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a Unix socket, as the kernel says (SO_PEERCRED, in our pid namespace)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Credentials that the peer had when it connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PeerCredentials.size)
    return Peer(*PeerCredentials.unpack(raw))


class Channel:
    """Frames over an asyncio stream, without descriptors."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer = peer_of(writer.get_extra_info("socket"))

    async def receive(self) -> Frame | None:
        """The next frame, or None at the end of the stream."""
        try:
            kind, length = parse_header(await self._reader.readexactly(HEADER.size))
            return parse_payload(kind, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def send(self, frame: Frame) -> None:
        """Send a frame; a peer that is gone is no error here, `receive` tells."""
        try:
            self._writer.write(encode(frame))
            await self._writer.drain()
        except (ConnectionError, RuntimeError):
            pass

    async def end(self) -> None:
        """Say that nothing more comes, and wait until the other side has closed; what it still sends is dropped."""
        self._writer.write_eof()
        while await self._reader.read(1 << 16):
            pass

    def close(self) -> None:
        self._writer.close()


def ends_quietly(handler: Handler) -> Handler:
    """A server's handler for asyncio, whose cancellation at the program's end is an end like any other.

    asyncio of Python 3.11 asks a cancelled handler for its exception, and prints the traceback of that.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except asyncio.CancelledError:
            writer.close()

    return handle


async def connect(path: str) -> Channel:
    """Open a channel to a listening Unix socket; OSError as from connect(2)."""
    return Channel(*await asyncio.open_unix_connection(path))


async def channel_from(sock: socket.socket) -> Channel:
    """A channel over a connected socket that we own."""
    return Channel(*await asyncio.open_connection(sock=sock))


def send_record(sock: socket.socket, data: bytes, fds: Iterable[int] = ()) -> None:
    """Send a length-prefixed record, with descriptors attached to its first byte (blocking sockets)."""
    message = struct.pack("<I", len(data)) + data
    passed = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else []
    sent = sock.sendmsg([message], ancillary)
    sock.sendall(message[sent:])


def receive_record(sock: socket.socket, max_bytes: int = 64 << 20) -> tuple[bytes, list[int]] | None:
    """The next record and its descriptors, or None at the end of the stream (blocking sockets). A peer that died
    before it had read everything has ended it, too."""
    try:
        return _receive_record(sock, max_bytes)
    except ConnectionResetError:
        return None


def _receive_record(sock: socket.socket, max_bytes: int) -> tuple[bytes, list[int]] | None:
    head, fds = b"", []
    while len(head) < 4:
        part, got, _flags, _address = socket.recv_fds(sock, 4 - len(head), MAX_RECORD_FDS)
        fds += got
        if not part:
            return None
        head += part
    (length,) = struct.unpack("<I", head)
    if length > max_bytes:
        raise ProtocolError(reason=f"record of {length} bytes")
    body = bytearray()
    while len(body) < length:
        part = sock.recv(min(1 << 20, length - len(body)))
        if not part:
            return None
        body += part
    return bytes(body), fds


def env_pairs(env: Mapping[str, str]) -> list[str]:
    """An environment as the values of `ENV` keys."""
    return [f"{key}={value}" for key, value in env.items()]
