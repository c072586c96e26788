"""Sockets that CRIU cannot save. Family and protocol are not in /proc: a copy of the descriptor tells."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator

_PIDFD_GETFD = 438  # by number: Python has no name for it; the same on every architecture (syscall(2))
# criu/sockets.c and sk-inet.c of CRIU 4.2. Raw sockets may have any protocol.
_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, socket.AF_NETLINK}
_INTERNET = {socket.AF_INET, socket.AF_INET6}
_PROTOCOLS = {
    socket.IPPROTO_IP,
    socket.IPPROTO_TCP,
    socket.IPPROTO_UDP,
    136,  # UDP-Lite
    socket.IPPROTO_ICMP,
    socket.IPPROTO_ICMPV6,
}
_MPTCP = 262
_NAMES = {132: "an SCTP socket", 33: "a DCCP socket", 256: "an SMC socket"}

_libc = ctypes.CDLL(None, use_errno=True)


def unsaved(pid: int, descriptors: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of these sockets of a process those that cannot be saved: number of the descriptor, what it is.

    Looks at a copy of each, which is closed at once. What cannot be looked at is left to CRIU.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for number in descriptors:
            copy = _libc.syscall(_PIDFD_GETFD, process, int(number), 0)
            if copy >= 0:
                what = _what(copy)
                if what is not None:
                    yield number, what
    finally:
        os.close(process)


def _what(descriptor: int) -> str | None:
    """What a socket is, if it cannot be saved. Closes the descriptor."""
    try:
        held = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    with held:
        if held.family not in _FAMILIES:
            return f"a socket of the family {getattr(held.family, 'name', held.family)}"
        if held.family not in _INTERNET or held.type == socket.SOCK_RAW or held.proto in _PROTOCOLS:
            return None
        if held.proto == _MPTCP:
            return "an MPTCP socket (in Go programs GODEBUG=multipathtcp=0 makes it a TCP socket)"
        return _NAMES.get(held.proto, f"a socket of the protocol {held.proto}")
