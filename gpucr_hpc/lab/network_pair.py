"""Two tasks on two nodes that measure the network between them, run as a job. Standard library only.

usage: network_pair.py ROUNDS TURN_FILE ME OTHER SEGMENT_BYTES BYTES [CONGESTION_CONTROL]. Rank 1 sends, rank 0 answers.
Rank 1 waits for its turn before each round: the first byte of TURN_FILE is ME; afterwards it writes OTHER there. So a
protected and an unprotected pair take turns on the same nodes. Each round prints the rate of a transfer of BYTES, the
processor time a byte of the task that took more, and the median round trip of short messages; all with segments of
SEGMENT_BYTES.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import sys
import time

PORT = 5701
MESSAGES, MESSAGE_BYTES = 200, 64
_ORDER = struct.Struct("<cQ")
_USED = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 18


def first_node() -> str:
    """The node of rank 0, from Slurm's list: `a,b`, or `n[1-2]`, a range that starts with it."""
    name = os.environ["SLURM_JOB_NODELIST"].split(",")[0]
    prefix, bracket, rest = name.partition("[")
    return prefix + rest.split("-")[0].rstrip("]") if bracket else name


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return data


def answer(connection: socket.socket) -> None:
    """Rank 0: take what comes until the other side ends."""
    buffer = bytearray(_BUFFER_BYTES)
    while True:
        try:
            kind, count = _ORDER.unpack(exactly(connection, _ORDER.size))
        except EOFError:
            return
        if kind == b"T":
            start = time.process_time_ns()
            while count:
                count -= connection.recv_into(buffer, min(count, len(buffer)))
            connection.sendall(_USED.pack(time.process_time_ns() - start))
        else:
            for _ in range(count):
                connection.sendall(exactly(connection, MESSAGE_BYTES))


def measure(connection: socket.socket, size_bytes: int) -> tuple[float, float, float]:
    """One round: bytes a second, seconds of processor time a byte, seconds of a round trip."""
    data = bytes(_BUFFER_BYTES)
    start, used_before = time.perf_counter(), time.process_time_ns()
    connection.sendall(_ORDER.pack(b"T", size_bytes))
    for _ in range(size_bytes // len(data)):
        connection.sendall(data)
    used_there = _USED.unpack(exactly(connection, _USED.size))[0]
    rate = size_bytes / (time.perf_counter() - start)
    used = max(used_there, time.process_time_ns() - used_before) / 1e9 / size_bytes
    connection.sendall(_ORDER.pack(b"P", MESSAGES))
    trips = []
    for _ in range(MESSAGES):
        start = time.perf_counter()
        connection.sendall(data[:MESSAGE_BYTES])
        exactly(connection, MESSAGE_BYTES)
        trips.append(time.perf_counter() - start)
    return rate, used, statistics.median(trips)


def prepared(sock: socket.socket, segment_bytes: int, congestion_control: str) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion_control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    return sock


def main() -> None:
    rounds, turn_file, me, other = sys.argv[1:5]
    segment_bytes, size_bytes, congestion_control = int(sys.argv[5]), int(sys.argv[6]), "".join(sys.argv[7:])
    rank = int(os.environ["SLURM_PROCID"])
    processors = sorted(os.sched_getaffinity(0) | set(range(os.cpu_count() or 1)))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})  # the same for every pair
    if rank == 0:
        with prepared(socket.socket(), segment_bytes, congestion_control) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", PORT))
            server.listen()
            connection, _ = server.accept()
            answer(prepared(connection, segment_bytes, congestion_control))
        return
    deadline = time.monotonic() + 30
    while True:
        connection = prepared(socket.socket(), segment_bytes, congestion_control)
        try:
            connection.connect((first_node(), PORT))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            connection.close()
            time.sleep(0.05)
    turn = os.open(turn_file, os.O_RDWR)
    print("SEGMENT", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), flush=True)
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0]
    print("CONTROL", name.decode(), flush=True)
    for _ in range(int(rounds)):
        while os.pread(turn, 1, 0) != me.encode():
            time.sleep(0.002)
        print("ROUND", *measure(connection, size_bytes), flush=True)
        os.pwrite(turn, other.encode(), 0)
    print("END", flush=True)


if __name__ == "__main__":
    main()
