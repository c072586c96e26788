"""Sockets that CRIU cannot save, and what can be done about some. Family, protocol and peer are not in /proc: a copy of
the descriptor tells.

Connections to services of the node over Unix sockets stay behind. Some clients make them again when they find them
gone: libnss_sss, with which programs look up users where SSSD is used, and syslog(3). Those are hung up before a dump,
as the service does by itself when it is started anew or a client was silent for long.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

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

_HANG_UP_LIMIT_S = 2.0
_ACCEPTS, _DATAGRAM = 0x10000, 2  # flags and types of /proc/net/unix
_NO_ADDRESS = bytes(16)  # struct sockaddr of AF_UNSPEC

_libc = ctypes.CDLL(None, use_errno=True)


def unsaved(pid: int, descriptors: Iterable[str], reconnecting: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Of these sockets of a process those that cannot be saved: number of the descriptor, what it is.

    reconnecting: patterns of paths of services that `hang_up` hangs up on. What cannot be looked at is left to CRIU.
    """
    names: tuple[set[str], set[str]] | None = None
    for number, held in _copies(pid, descriptors):
        what = _what(held)
        path = _service(held) if held.family == socket.AF_UNIX else None
        if path is not None and not _matches(path, reconnecting):
            names = names or (_names("self"), _names(str(pid)))
            if path in names[0] - names[1]:
                what = f"connected to {path}, a service outside of the job"
        if what is not None:
            yield number, what


def hang_up(pids: Iterable[int], reconnecting: Sequence[str]) -> list[str]:
    """End the connections of processes to services whose clients make them again; paths of those that were there.

    Takes 2 s at most. A service that has not hung up by then stays connected, and CRIU fails.
    """
    paths, ending = [], []
    for pid in pids if reconnecting else ():
        with suppress(OSError):
            numbers = [n for n in os.listdir(f"/proc/{pid}/fd") if _is_socket(f"/proc/{pid}/fd/{n}")]
            for _, held in _copies(pid, numbers):
                path = _service(held) if held.family == socket.AF_UNIX else None
                if path is None or not _matches(path, reconnecting):
                    continue
                paths.append(path)
                if held.type == socket.SOCK_DGRAM:
                    _libc.connect(held.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))
                else:
                    held.shutdown(socket.SHUT_WR)  # the service reads its end, and closes
                    ending.append(held.dup())
    end = time.monotonic() + _HANG_UP_LIMIT_S
    for held in ending:
        with held:
            _is_hung_up(held, max(0.0, end - time.monotonic()))
    return paths


def _copies(pid: int, descriptors: Iterable[str]) -> Iterator[tuple[str, socket.socket]]:
    """A copy of each socket, closed when the next one is asked for."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for number in descriptors:
            copy = _libc.syscall(_PIDFD_GETFD, process, int(number), 0)
            if copy < 0:
                continue
            try:
                held = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with held:
                yield number, held
    finally:
        os.close(process)


def _what(held: socket.socket) -> str | None:
    """What a socket is, if CRIU does not save its kind."""
    if held.family not in _FAMILIES:
        return f"a socket of the family {getattr(held.family, 'name', held.family)}"
    if held.family not in _INTERNET or held.type == socket.SOCK_RAW or held.proto in _PROTOCOLS:
        return None
    if held.proto == _MPTCP:
        return "an MPTCP socket (in Go programs GODEBUG=multipathtcp=0 makes it a TCP socket)"
    return _NAMES.get(held.proto, f"a socket of the protocol {held.proto}")


def _service(held: socket.socket) -> str | None:
    """The path to which a Unix socket is connected, None when there is none or the other end has been closed."""
    try:
        path = held.getpeername()
    except OSError:
        return None
    is_path = isinstance(path, str) and path
    return path if is_path and (held.type == socket.SOCK_DGRAM or not _is_hung_up(held, 0.0)) else None


def _is_hung_up(held: socket.socket, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(held, 0)
    return bool(poll.poll(limit_s * 1000))


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _names(pid: str) -> set[str]:
    """Paths at which Unix sockets in a process's network namespace listen, or take datagrams. What a service has
    accepted is, with its path, in the namespace of the client."""
    try:
        with open(f"/proc/{pid}/net/unix", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").split(None, 7) for line in file][1:]
        return {row[7] for row in rows if len(row) == 8 and (int(row[3], 16) & _ACCEPTS or int(row[4]) == _DATAGRAM)}
    except OSError:
        return set()


def _is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except OSError:
        return False
