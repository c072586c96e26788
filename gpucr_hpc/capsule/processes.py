"""The processes of a pid namespace, seen from outside."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process. pid, ppid, tracer: on the host; nspid: inside the namespace. state: letter of proc(5)."""

    pid: int
    nspid: int
    ppid: int
    name: str
    state: str
    uid: int
    tracer: int
    threads: int


def read_process(pid: int) -> Process | None:
    """What /proc says of a process, or None when it is gone. One that is just being reaped is: for a moment it has a
    status, the state X, and the number 0 in each namespace."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    try:
        nspid = int(fields["NSpid"].split()[-1])
        if not nspid:
            return None
        return Process(
            pid=pid,
            nspid=nspid,
            ppid=int(fields["PPid"]),
            name=fields["Name"],
            state=fields["State"][0],
            uid=int(fields["Uid"].split()[1]),
            tracer=int(fields["TracerPid"]),
            threads=int(fields["Threads"]),
        )
    except (KeyError, ValueError, IndexError):
        return None


def highest_id(process: Process) -> int:
    """The highest number, inside the namespace, of a process and its threads: threads have numbers of their own."""
    found = process.nspid
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            text = Path(f"/proc/{process.pid}/task/{thread}/status").read_text(errors="replace")
        except OSError:
            continue
        _, _, after = text.partition("NSpid:")
        found = max(found, int(after.partition("\n")[0].split()[-1])) if after else found
    return found


def namespace_of(pid: int, kind: str) -> str | None:
    """Identity of a namespace of a process, such as "pid:[4026531836]"; None when it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def namespace_processes(init_pid: int) -> list[Process]:
    """Every process of init's pid namespace, init itself first."""
    wanted = namespace_of(init_pid, "pid")
    if wanted is None:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and namespace_of(int(entry), "pid") == wanted:
            process = read_process(int(entry))
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda p: p.nspid)


def processes_with_network(path: Path) -> list[int]:
    """Living processes in the network namespace that is kept at `path`; none when it is not there."""
    try:
        wanted = f"net:[{path.stat().st_ino}]"
    except OSError:
        return []
    return [int(e) for e in os.listdir("/proc") if e.isdigit() and namespace_of(int(e), "net") == wanted]


def descendants(processes: list[Process], pid: int) -> list[Process]:
    """The processes below one (pid on the host), by their parents; daemons that left it are not among them."""
    children = [p for p in processes if p.ppid == pid]
    return children + [below for child in children for below in descendants(processes, child.pid)]


async def wait_gone(pid: int) -> None:
    """Return when a process has ended; at once when there is none of that number."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, gone.set)
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with the pid it names a process for ever."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def strangers(processes: list[Process], root_nspid: int) -> list[Process]:
    """Processes of the namespace that do not descend from the root of the dump: they would be lost.

    Zombies of init itself are not counted; init reaps them.
    """
    by_pid = {p.pid: p for p in processes}
    init = processes[0]

    def inside(process: Process) -> bool:
        seen = process
        while seen.nspid != root_nspid:
            parent = by_pid.get(seen.ppid)
            if parent is None or parent.pid == init.pid:
                return False
            seen = parent
        return True

    return [p for p in processes if p.nspid != 1 and p.state != "Z" and not inside(p)]
