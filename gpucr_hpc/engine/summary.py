"""What a tree was at its checkpoint, for people: command lines, descriptors, sockets, mappings.

Read from /proc while the tree is frozen, less than a millisecond for a process, and kept as one sealed stream of
the image. A restore does not need it: whatever cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import Process

SUMMARY_STREAM = "summary.json"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_TCP_STATES = (
    *("ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT", "LAST_ACK"),
    *("LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
_UNIX_TYPES = {1: "stream", 2: "datagram", 5: "seqpacket"}


def collect(processes: list[Process], init_pid: int) -> bytes:
    """The summary of a capsule's processes; init_pid: one whose network namespace they share."""
    known = sockets(Path(f"/proc/{init_pid}/net"))
    parents = {p.pid: p.nspid for p in processes}
    found = [_process(p, parents.get(p.ppid, 0), known) for p in processes]
    return json.dumps({"processes": found}, separators=(",", ":")).encode()


def decode(data: bytes) -> list[dict[str, Any]]:
    """The processes of a summary, in the order of their numbers."""
    processes: list[dict[str, Any]] = json.loads(data)["processes"]
    return sorted(processes, key=lambda p: int(p["pid"]))


def _process(process: Process, parent: int, known: dict[str, str]) -> dict[str, Any]:
    root = Path(f"/proc/{process.pid}")
    record: dict[str, Any] = {
        "pid": process.nspid,
        "parent": parent,
        "name": process.name,
        "uid": process.uid,
        "threads": process.threads,
        "argv": [],
        "executable": "",
        "directory": "",
        "descriptors": {},
        "maps": "",
    }
    with contextlib.suppress(OSError):  # a zombie has none of these
        record["argv"] = (root / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        record["maps"] = (root / "maps").read_text(errors="replace")
        record["executable"], record["directory"] = os.readlink(root / "exe"), os.readlink(root / "cwd")
    for number, target in _descriptors(root / "fd"):
        inode = _SOCKET.fullmatch(target)
        record["descriptors"][number] = known.get(inode[1], target) if inode else target
    return record


def _descriptors(directory: Path) -> Iterator[tuple[str, str]]:
    try:
        numbers = sorted(os.listdir(directory), key=int)
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            yield number, os.readlink(directory / number)


# --- sockets --------------------------------------------------------------------------------------------


def sockets(net: Path) -> dict[str, str]:
    """Sockets of a network namespace by inode, such as "tcp 10.200.0.1:80 <- 10.200.0.2:4711 ESTABLISHED"."""
    found: dict[str, str] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _lines(net / kind):
            with contextlib.suppress(ValueError, IndexError):
                local, remote = _address(fields[1]), _address(fields[2])
                text = f"{kind} {local}" if remote.endswith(":0") else f"{kind} {local} - {remote}"
                state = f" {_TCP_STATES[int(fields[3], 16) - 1]}" if kind.startswith("tcp") else ""
                found[fields[9]] = text + state
    for fields in _lines(net / "unix"):
        with contextlib.suppress(ValueError, IndexError):
            kind = _UNIX_TYPES.get(int(fields[4], 16), "socket")
            found[fields[6]] = " ".join(["unix", kind, *fields[7:]])
    return found


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        lines = path.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    yield from (line.split() for line in lines)


def _address(text: str) -> str:
    """Address and port of proc_net_tcp(5): words of the address in host order, the port as a number."""
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"
