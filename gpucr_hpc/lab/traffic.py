"""One rank of the migration soak, run inside a job: full-rate TCP between two nodes, every byte checked.

Rank 1 connects to rank 0 and sends blocks; rank 0 compares each with what it must be and sends it back; rank 1
compares again. A reset, a lost, doubled or altered byte ends the program with a message and exit code 1. Both stop
after a number of blocks that the first node's file says. Standard library only.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path

PORT = 5700
BLOCK_BYTES = 1 << 16
HEADER = struct.Struct("<QI")


def block(number: int) -> bytes:
    """What block `number` looks like: its number in front, then bytes that depend on it."""
    seed = (number * 2654435761) & 0xFFFFFFFF
    body = struct.pack("<I", seed) * ((BLOCK_BYTES - HEADER.size) // 4 + 1)
    return (HEADER.pack(number, seed) + body)[:BLOCK_BYTES]


def receive(connection: socket.socket, number: int) -> None:
    """Read one block and compare it; exit with a message when it is not the one."""
    data = bytearray()
    while len(data) < BLOCK_BYTES:
        part = connection.recv(BLOCK_BYTES - len(data))
        if not part:
            sys.exit(f"block {number}: the connection ended")
        data += part
    if data != block(number):
        sys.exit(f"block {number}: wrong bytes, says {HEADER.unpack_from(data)[0]}")


def connect(host: str) -> socket.socket:
    """Connect to rank 0, which may not listen yet."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=None)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    """usage: traffic.py STOP_FILE; the job ends when that file appears, after the block in hand."""
    stop, rank = Path(sys.argv[1]), int(os.environ["SLURM_PROCID"])
    first = os.environ["SLURM_JOB_NODELIST"].split(",")[0]
    if "[" in first:  # n[1-2]: a range that starts with the first node
        prefix, _, rest = first.partition("[")
        first = prefix + rest.split("-")[0].split("]")[0]
    if rank == 0:
        with socket.create_server(("", PORT)) as server:
            connection, _ = server.accept()
    else:
        connection = connect(first)
    number = 0
    last = time.monotonic()
    while True:
        if rank == 0:
            flag = connection.recv(1)
            if flag != b"+":
                break
            receive(connection, number)
            connection.sendall(block(number))
        else:
            if stop.exists():
                connection.sendall(b".")
                break
            connection.sendall(b"+" + block(number))
            receive(connection, number)
        number += 1
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            print(f"rank {rank}: {number} blocks", flush=True)
    print(f"RESULT rank {rank}: {number} blocks good")


if __name__ == "__main__":
    main()
