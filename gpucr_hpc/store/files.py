"""Files and directories of a store, each reached through dir_fd, the descriptor of the directory above; no symbolic
link is followed. Errors are the store's, with the path that the caller gives for them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from gpucr_hpc.errors import ObjectMissing, StoreError, store_error

TEMPORARY = ".tmp-"  # in the name of a file that is not whole yet
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO put there by somebody else must not stop the reader.
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class StoreFile(io.FileIO):
    """An unbuffered file whose errors are the store's; write takes everything or raises."""

    def __init__(self, fd: int, mode: str, path: str) -> None:
        super().__init__(fd, mode)
        self.path = path

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises StoreFull, StoreError."""
        left = memoryview(data).cast("B")
        total = len(left)
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:
            raise store_error(self.path, error) from None
        return total

    def close(self) -> None:
        """Close; on some file systems a full disk shows only here."""
        try:
            super().close()
        except OSError as error:
            raise store_error(self.path, error) from None


@contextmanager
def errors_at(path: object) -> Iterator[None]:
    """Turn errors of the operating system into ObjectMissing and the store's others, which name `path`."""
    try:
        yield
    except FileNotFoundError:
        raise ObjectMissing(path=path) from None
    except OSError as error:
        raise store_error(path, error) from None


@contextmanager
def open_directory(name: str, dir_fd: int, path: str) -> Iterator[int]:
    """Descriptor of a directory, for the length of a block."""
    with errors_at(path):
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def exists(name: str, dir_fd: int) -> bool:
    """Whether there is anything of this name."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def open_file(name: str, dir_fd: int, path: str) -> StoreFile:
    """Open a regular file to read; anything else is refused with StoreError."""
    with errors_at(path):
        fd = os.open(name, _OLD_FILE, dir_fd=dir_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StoreError(path=path, reason="not a regular file")
        return StoreFile(fd, "r", path)


def read_all(file: BinaryIO, limit: int, path: str) -> bytes:
    """The whole content; StoreError when it is more than `limit` bytes."""
    with errors_at(path):
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise StoreError(path=path, reason=f"has {size} bytes, more than {limit}")
        return file.read()


def replace_file(name: str, data: bytes, dir_fd: int, path: str) -> None:
    """Temporary name, fsync, rename, fsync of the directory; the temporary is removed on failure."""
    temporary = f"{name}{TEMPORARY}{secrets.token_hex(4)}"
    try:
        _write_new(temporary, data, dir_fd, path)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    os.fsync(dir_fd)


def add_file(name: str, data: bytes, dir_fd: int, path: str) -> bool:
    """As replace_file, but what is there stays; whether the name was free."""
    temporary = f"{name}{TEMPORARY}{secrets.token_hex(4)}"
    try:
        _write_new(temporary, data, dir_fd, path)
        try:
            os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            _write_new(name, data, dir_fd, path)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
    os.fsync(dir_fd)
    return True


def _write_new(name: str, data: bytes, dir_fd: int, path: str) -> None:
    with StoreFile(os.open(name, NEW_FILE, 0o600, dir_fd=dir_fd), "w", path) as file:
        file.write(data)
        os.fsync(file.fileno())


def last_change(name: str, dir_fd: int) -> float:
    """Newest time of change of a file, or of a directory and what lies in it."""
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    newest = status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        with open_directory(name, dir_fd, name) as fd:
            for inner in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, os.stat(inner, dir_fd=fd, follow_symlinks=False).st_mtime)
    return newest


def remove_tree(name: str, dir_fd: int) -> None:
    """Remove a file or a flat or deep directory, following no link; what is gone already is fine."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)
        return
    try:
        for inner in os.listdir(fd):
            remove_tree(inner, fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=dir_fd)
