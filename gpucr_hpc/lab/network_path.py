"""What the kernel spends on 64 KiB of TCP between two nodes, inside and outside of capsules, in one thread.

The thread enters the network namespaces of both ends, sends, and receives what it has sent: the kernel does the work of
both ends and of all links in these two system calls. No other task, wake-up or processor is in it, so that single
percents are seen on a busy machine, too; and the data stays in the processor's cache, so that the copies cost less and
the way weighs more than between two tasks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES
from gpucr_hpc.lab.wait import wait_until

PORT = 5702
PAIRS = 4  # connections of each place: where their memory lies changes the cost of each by some percent
CHUNKS = 6  # of 4 segments of 64 KiB: a round
_WARM_UP_ROUNDS = 5
_UNPACED = "reno"  # there on every kernel; with one that paces (bbr) timers send, too, and the figures vary by half
_SEGMENTS = 46  # of TCP: the most that the kernel sends as one piece of up to 64 KiB
_SIOCGIFADDR = 0x8915
_CLONE_NEWNET = 0x40000000


def measure(lab: Lab, rounds: int, segment_bytes: int, congestion_control: str) -> dict[str, Any]:
    """Medians of nanoseconds for 64 KiB. Raises LabError."""
    nodes = lab.nodes()[1:3]
    ready = lab.state / HOMES.lstrip("/") / "alice" / "network-path"
    ready.unlink(missing_ok=True)
    script = f"#!/bin/bash\nsrun --ntasks=2 --nodes=2 hostname\ntouch {ready.name}\nsleep 600\n"
    where = ["-w", ",".join(nodes), "--nodes=2", "--ntasks-per-node=1", "--output=network-path.out"]
    job = lab.sbatch(script, "alice", *where, "--checkpoint-on-preempt")
    try:
        wait_until(ready.exists, 60, f"the start of job {job}")
        pids = [str(lab.pid(node)) for node in nodes]
        places = {"outside": "ns/net", "inside": f"root/run/netns/gpucr-{job}"}
        ends = {place: [Path("/proc", pid, path) for pid in pids] for place, path in places.items()}
        if not all(path.exists() for path in ends["inside"]):
            raise LabError(reason=f"job {job} is not protected")
        return compare(ends, rounds, segment_bytes, congestion_control or _UNPACED)
    finally:
        lab.cancel_all()
        ready.unlink(missing_ok=True)


def compare(places: dict[str, list[Path]], rounds: int, segment_bytes: int, congestion_control: str) -> dict[str, Any]:
    """places: network namespaces of the receiving and of the sending end, for each place's name."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    ends = [
        (place, *_connection(server, client, PORT + number, segment_bytes, congestion_control))
        for number in range(PAIRS)
        for place, (server, client) in places.items()
    ]
    size = ends[0][1].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    data, buffer = bytes(4 * _SEGMENTS * size), bytearray(1 << 18)
    spent: list[list[tuple[int, int]]] = [[] for _ in ends]
    for _ in range(_WARM_UP_ROUNDS + rounds):
        for number in random.sample(range(len(ends)), len(ends)):
            _, sender, receiver = ends[number]
            spent[number].append(_round(sender, receiver, data, buffer))
    report: dict[str, Any] = {"type": "network path", "rounds": rounds, "segment_bytes": segment_bytes}
    report["congestion_control"] = congestion_control
    for place in places:
        of_place = [spent[i][_WARM_UP_ROUNDS:] for i, (where, _, _) in enumerate(ends) if where == place]
        for kind, way in enumerate(("sending", "receiving")):
            medians = [statistics.median(values[kind] for values in of_pair) for of_pair in of_place]
            report[f"{place}_{way}_ns"] = round(statistics.median(medians))
            report[f"{place}_{way}_ns_of_pairs"] = sorted(map(round, medians))
    return report


def tell(report: dict[str, Any]) -> None:
    """The report in words; in brackets each connection's own."""
    for way in ("sending", "receiving"):
        outside, inside = (report[f"{where}_{way}_ns"] for where in ("outside", "inside"))
        of_pairs = [report[f"{where}_{way}_ns_of_pairs"] for where in ("outside", "inside")]
        print(f"{way} 64 KiB: {outside} ns outside {of_pairs[0]}, {inside} ns inside a capsule {of_pairs[1]}")
        print(f"  outside / inside: {outside / inside:.3f}")


def _connection(
    server: Path, client: Path, port: int, segment_bytes: int, congestion_control: str
) -> tuple[socket.socket, socket.socket]:
    """A connection between two namespaces: sender and receiver."""

    def end() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        return made

    with _inside(server), end() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen()
        address = _address()
        with _inside(client):
            sender = end()
            sender.connect((address, port))
        return sender, listener.accept()[0]


def _address() -> str:
    """Of this namespace, as the other node sees it: of job0 in a capsule, else of eth0."""
    interfaces = {name for _, name in socket.if_nameindex()}
    request = struct.pack("40s", b"job0" if "job0" in interfaces else b"eth0")  # struct ifreq
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])


@contextmanager
def _inside(namespace: Path) -> Iterator[None]:
    """This thread in another network namespace; sockets made there stay there."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(namespace, os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _round(sender: socket.socket, receiver: socket.socket, data: bytes, buffer: bytearray) -> tuple[int, int]:
    """Nanoseconds of processor time for 64 KiB: of sending, of receiving."""
    sending = receiving = 0
    for _ in range(CHUNKS):
        start = time.thread_time_ns()
        sender.sendall(data)
        sent = time.thread_time_ns()
        left = len(data)
        while left:
            left -= receiver.recv_into(buffer, min(left, len(buffer)))
        receiving += time.thread_time_ns() - sent
        sending += sent - start
    pieces = CHUNKS * len(data) / 65536
    return round(sending / pieces), round(receiving / pieces)
