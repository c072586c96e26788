"""Regular files that a tree has open: recorded at the dump, made fit before a restore."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.processes import Process

_WRITE = os.O_WRONLY | os.O_RDWR


class FilesPolicy(enum.StrEnum):
    """What a restore does about files that grew after the checkpoint: cut them and keep the tails beside; let the tails
    stay in them; or refuse."""

    ROLLBACK = "rollback"
    KEEP = "keep"
    REFUSE = "refuse"


@dataclass(frozen=True)
class OpenFile:
    """A file open for writing: path inside the capsule, size in bytes at the dump, open(2) flags.

    identity: two nodes have the same file when path and identity are equal. shared: several nodes of the job have it.
    """

    path: str
    size_bytes: int
    flags: int
    identity: str = ""
    shared: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def writable_files(processes: list[Process], private: tuple[str, ...]) -> list[OpenFile]:
    """Every named regular file that a process can write to, once per path.

    Files below a private directory travel in the image and are left out, deleted files too.
    """
    found: dict[str, OpenFile] = {}
    for process in processes:
        directory = f"/proc/{process.pid}/fd"
        try:
            numbers = os.listdir(directory)
        except OSError:
            continue
        for number in numbers:
            try:
                path, status = os.readlink(f"{directory}/{number}"), os.stat(f"{directory}/{number}")
                flags = _flags(process.pid, number)
            except (OSError, ValueError):
                continue
            if (
                stat.S_ISREG(status.st_mode)
                and flags & _WRITE
                and status.st_nlink
                and not path.startswith(tuple(f"{p}/" for p in private))
            ):
                found[path] = OpenFile(path, status.st_size, flags, _identity(status))
    return sorted(found.values(), key=lambda f: f.path)


def _identity(status: os.stat_result) -> str:
    """A file system without a device of its own is of the network, as a rule, and numbers its files for all nodes; the
    number of a disk says something on its own node only."""
    if os.major(status.st_dev) == 0:
        return str(status.st_ino)
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{status.st_dev}:{status.st_ino}"


def output_files(pids: list[int]) -> list[OpenFile]:
    """Regular files that supervisors have as standard output and error: the job writes them through the relay."""
    found: dict[str, OpenFile] = {}
    for pid in pids:
        for number in ("1", "2"):
            try:
                path, status = os.readlink(f"/proc/{pid}/fd/{number}"), os.stat(f"/proc/{pid}/fd/{number}")
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink:
                found[path] = OpenFile(path, status.st_size, _WRITE)
    return sorted(found.values(), key=lambda f: f.path)


def _flags(pid: int, number: str) -> int:
    with open(f"/proc/{pid}/fdinfo/{number}") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    raise ValueError("no flags")


def grown(files: list[OpenFile]) -> list[str]:
    """A line for each file that is larger than at the dump."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            more = os.stat(file.path, follow_symlinks=False).st_size - file.size_bytes
            if more > 0:
                found.append(f"{file.path} grew by {more} bytes after the checkpoint")
    return found


def set_aside(files: list[OpenFile], suffix: str) -> list[tuple[str, str, int]]:
    """Cut files that grew since the dump back to their size then; the tail is kept beside as PATH.SUFFIX.

    CRIU refuses a file of another size, and what a job writes again would stand there twice. Runs under the
    identity of the job's user. Returns path, tail's path and its size in bytes of each changed file; OSError, with
    the file's name, when one cannot be changed: then all are as they were.
    """
    changed: list[tuple[str, str, int]] = []
    try:
        for file in files:
            with _named(file.path):
                tail = _cut(file, suffix)
            if tail is not None:
                changed.append(tail)
    except OSError:
        put_back(changed)
        raise
    return changed


def _cut(file: OpenFile, suffix: str) -> tuple[str, str, int] | None:
    try:
        # One that has its size is not opened: its mode may keep its owner from writing, as while `cp` copies.
        if os.stat(file.path, follow_symlinks=False).st_size <= file.size_bytes:
            return None
        descriptor = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # CRIU names it
    with os.fdopen(descriptor, "r+b") as opened:
        more = os.fstat(opened.fileno()).st_size - file.size_bytes
        opened.seek(file.size_bytes)
        kept, aside = _create_beside(file.path, suffix)
        try:
            with os.fdopen(kept, "wb") as tail:
                while block := opened.read(1 << 20):
                    tail.write(block)
                tail.flush()
                os.fsync(tail.fileno())
        except OSError:
            os.unlink(aside)
            raise
        opened.truncate(file.size_bytes)
    return file.path, aside, more


def put_back(tails: list[tuple[str, str, int]]) -> None:
    """Undo `set_aside`: append each tail to its file again and remove it. OSError, with the file's name, leaves those
    that are left; whoever calls again with all of them goes on there."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    for path, aside, _ in tails:
        with _named(path):
            try:
                source = os.open(aside, os.O_RDONLY | flags)
            except FileNotFoundError:
                continue  # it is back
            with os.fdopen(source, "rb") as tail, os.fdopen(os.open(path, os.O_WRONLY | flags), "wb") as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    while block := tail.read(1 << 20):
                        file.write(block)
                    file.flush()
                except OSError:
                    os.ftruncate(file.fileno(), before)
                    raise
            os.unlink(aside)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors about a file have its name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def _create_beside(path: str, suffix: str) -> tuple[int, str]:
    """A new file PATH.SUFFIX, or PATH.SUFFIX.N when the job was rolled back to the same checkpoint before."""
    for number in itertools.count():
        name = f"{path}.{suffix}" + (f".{number}" if number else "")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o600), name
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
