"""One end of a connection between agents: messages over a TLS stream, and its end.

A message is its length (u32, little endian) and a JSON object. `version` in each is that of all that agents say to each
other; who reads another one than its own acts on nothing of it. Length, JSON and `version` are in every version.

Called by the event loop for each piece that comes, without a task or a timer of its own: the first agent of a job of a
thousand nodes has so many connections.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import json
import socket
import struct
from abc import ABC, abstractmethod
from typing import Any

#: Raised when an agent of before would misunderstand a request or an answer, or miss something in it.
VERSION = 1
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 << 20
_PROBE_AFTER_S, _PROBES = 4, 3  # a peer that is silent for 16 s is gone: well within Slurm's KillWait of 30 s
# asyncio gives each connection a buffer of this size for what it has decrypted; its own 256 KiB for each of a thousand
# nodes are 256 MiB that must be cleared first.
asyncio.sslproto.SSLProtocol.max_size = 16 << 10

Message = dict[str, Any]


class OtherVersion(Exception):
    """A message of an agent that speaks another version."""

    def __init__(self, version: object) -> None:
        super().__init__(f"version {version}")
        self.version = version


class Connection(asyncio.Protocol, ABC):
    """Cuts what comes into messages. What is sent is at most a message ahead of the other side, which answers each."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.peer = "?"  # address of the other side
        self._buffer = bytearray()
        self._ended = False
        self._gone = asyncio.Event()

    @abstractmethod
    def heard(self, message: Message) -> None:
        """A message came, here without its version. Raises ConnectionError where none was due."""

    @abstractmethod
    def ended(self, error: Exception | None) -> None:
        """Nothing more will come, told once. error: None when the other side, or this one, has closed in order."""

    def send(self, message: Message) -> None:
        """Send a message; to one that is gone it is no error here, `ended` tells."""
        data = json.dumps({**message, "version": VERSION}).encode()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Send what is not sent yet, and end the connection."""
        if self._transport is not None:
            self._transport.close()

    @property
    def alive(self) -> bool:
        """Whether no side has ended the connection, as far as is known here."""
        return self._transport is not None and not self._ended and not self._transport.is_closing()

    async def closed(self) -> None:
        """Wait until the connection is closed, by whichever side."""
        await self._gone.wait()

    # --- the event loop's ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str(transport.get_extra_info("peername")[0])
        notice_dead_peer(transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while not self._ended and (message := self._cut()) is not None:
                self.heard(message)
        except (OtherVersion, ConnectionError, ValueError) as error:
            self._end(error)
            self.close()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)
        self._gone.set()

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self.ended(error)

    def _cut(self) -> Message | None:
        """The next message, None while it is not there in whole."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionError(f"message of {length} bytes")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return None
        message = json.loads(buffer[_LENGTH.size : end].decode())
        del buffer[:end]
        if not isinstance(message, dict):
            raise ConnectionError(f"message is no object but {type(message).__name__}")
        if (version := message.pop("version", 0)) != VERSION:
            raise OtherVersion(version)
        return message


def notice_dead_peer(transport: asyncio.BaseTransport) -> None:
    """A node that lost power or its network ends no connection: without this its peers would wait for ever."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _PROBE_AFTER_S * (_PROBES + 1))
