"""Frames of the local protocol, and records with descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc import wire
from gpucr_hpc.wire import HEADER, MAGIC, MAX_PAYLOAD_BYTES, VERSION, Frame, ProtocolError, Type

KEYS = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=1, max_size=12)
VALUES = st.binary(max_size=60).map(lambda b: b.replace(b"\0", b"=").decode(errors="surrogateescape"))


def parsed(data: bytes) -> Frame:
    kind, length = wire.parse_header(data[: HEADER.size])
    assert length == len(data) - HEADER.size
    return wire.parse_payload(kind, data[HEADER.size :])


@given(st.sampled_from(Type), st.lists(st.tuples(KEYS, VALUES), max_size=8))
def test_frame_comes_back(kind, pairs):
    """Any bytes but NUL, '=' and line ends among them, pass through a frame in order."""
    assert Frame(kind, tuple(pairs)) == parsed(wire.encode(Frame(kind, tuple(pairs))))


def test_bytes_of_a_frame():
    """The layout that the C programs share."""
    frame = wire.make(Type.START, ("ENV", ["A=b", "C="]), SOCKET="/s", TASK="batch")
    payload = b"SOCKET=/s\0TASK=batch\0ENV=A=b\0ENV=C=\0"
    assert b"GC\x01\x00\x04\x00\x00\x00" + struct.pack("<I", len(payload)) + payload == wire.encode(frame)


def test_values_of_a_frame():
    frame = parsed(wire.encode(wire.make(Type.HELLO, ("ARG", ["a", "b"]), JOB=7)))
    assert ("7", 7, "", 0, ["a", "b"]) == (
        frame.get("JOB"), frame.int("JOB"), frame.get("NODE"), frame.int("SIGNAL"), frame.all("ARG"),
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="ARG='a' is not a number"):
        frame.int("ARG")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (HEADER.pack(b"XX", VERSION, 1, 0), "bad magic"),
        (HEADER.pack(MAGIC, 9, 1, 0), "version 9 is not known"),
        (HEADER.pack(MAGIC, VERSION, 999, 0), "unknown type 999"),
        (HEADER.pack(MAGIC, VERSION, 1, MAX_PAYLOAD_BYTES + 1), "payload of"),
    ],
)
def test_strange_header_is_refused(header, reason):
    with pytest.raises(ProtocolError, match=reason):
        wire.parse_header(header)


@pytest.mark.parametrize(("payload", "reason"), [(b"A=b", "not ended"), (b"A\0", "without '='")])
def test_strange_payload_is_refused(payload, reason):
    with pytest.raises(ProtocolError, match=reason):
        wire.parse_payload(Type.HELLO, payload)


def test_values_that_would_break_a_frame_are_refused():
    with pytest.raises(ProtocolError, match="NUL byte in MSG"):
        wire.encode(wire.make(Type.PRINT, MSG="a\0b"))
    with pytest.raises(ProtocolError, match="too many"):
        wire.encode(wire.make(Type.PRINT, MSG="x" * (MAX_PAYLOAD_BYTES + 1)))


def test_type_numbers_are_those_of_the_text(pytestconfig):
    """docs/protocol.md lists every type with its number."""
    table = {}
    for line in (pytestconfig.rootpath / "docs/protocol.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1].isdigit() and cells[2].isupper():
            table[cells[2]] = int(cells[1])
    assert {kind.name: kind.value for kind in Type}.items() <= table.items()


def test_channel_ends_with_none():
    """A frame is read whole; the end of the stream, also in the middle of a frame, is None."""

    async def talk() -> list[Frame | None]:
        ours, theirs = socket.socketpair()
        channel = await wire.channel_from(ours)
        assert (os.getpid(), os.getuid()) == (channel.peer.pid, channel.peer.uid)
        with theirs:
            theirs.sendall(wire.encode(wire.make(Type.OK)) + wire.encode(wire.make(Type.PRINT, MSG="hi"))[:-2])
        got = [await channel.receive(), await channel.receive()]
        await channel.send(wire.make(Type.OK))  # to nobody: no error
        channel.close()
        return got

    assert [Frame(Type.OK), None] == asyncio.run(talk())


@given(st.binary(max_size=5000))
def test_record_comes_back_with_descriptors(data):
    one, two = socket.socketpair()
    with one, two:
        read, write = os.pipe()
        wire.send_record(one, data, [write])
        received = wire.receive_record(two)
        assert received is not None
        assert data == received[0]
        (copy,) = received[1]
        os.write(copy, b"x")
        assert os.read(read, 2) == b"x"
        for fd in (read, write, copy):
            os.close(fd)
        one.shutdown(socket.SHUT_WR)
        assert wire.receive_record(two) is None


def test_oversized_record_is_refused():
    one, two = socket.socketpair()
    with one, two:
        wire.send_record(one, b"12345")
        with pytest.raises(ProtocolError, match="record of 5 bytes"):
            wire.receive_record(two, max_bytes=4)


@pytest.mark.parametrize("sent", [b"", b"\x05\0", b"\x05\0\0\0abc"], ids=["nothing", "half a head", "half a body"])
@pytest.mark.parametrize("unread", [b"", b"an answer"], ids=["all read", "unread"])
def test_record_of_a_peer_that_died(sent, unread):
    """A process that is killed with something unread resets its connections; that is an end like any other."""
    one, two = socket.socketpair()
    with two:
        two.sendall(unread)
        one.sendall(sent)
        one.close()
        assert wire.receive_record(two) is None
