"""Reads and writes at an offset, for files with a descriptor and for those in memory.

Who calls: writer and reader. pread and pwrite need no lock, so several workers can be in one pack at once; a
file without a descriptor (MemoryStore) is served under a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import stat
import threading
from collections.abc import Sequence
from typing import BinaryIO

from gpucr_hpc.errors import store_error
from gpucr_hpc.image import native
from gpucr_hpc.image.buffers import Buffer

#: Pipes are made this large: the default maximum for a process without privilege.
PIPE_BYTES = 1 << 20
_MAX_WORKERS = 8  # more were slower on 16 and 32 processors: they wait for the interpreter
_BEHIND_BYTES = 16 << 20
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE, sync_file_range(2)
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def default_workers(most: int = _MAX_WORKERS) -> int:
    """Threads that work on chunks: the cores this process may use, 2 to `most`."""
    return max(2, min(most, len(os.sched_getaffinity(0))))


def widen_pipe(fd: int, size_bytes: int = PIPE_BYTES) -> int:
    """Make a pipe at least so large; a refusal (the kernel's limit, the user's) only costs time. Its size in bytes, 0
    for anything but a pipe. Raises OSError for a bad fd."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return 0
    if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < size_bytes:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size_bytes)
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def wait_for(fd: int, event: int) -> None:
    """Wait until a non-blocking descriptor can go on; event: select.POLLIN or POLLOUT."""
    poll = select.poll()
    poll.register(fd, event)
    poll.poll()


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except (OSError, AttributeError):
        return None


def write_spans(fd: int, buffer: Buffer, spans: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Write pieces of a buffer (offset in it, offset in the file, size) until one fails: 0, an error number or
    native.SHORT, and the offset in the file that failed."""
    if native.library is not None:
        return native.library.put(fd, [(buffer.address + at, to, size) for at, to, size in spans])
    for at, to, size in spans:
        done = 0
        while done < size:
            try:
                count = os.pwrite(fd, buffer.view[at + done : at + size], to + done)
            except OSError as error:
                return error.errno or errno.EIO, to + done
            if not count:
                return native.SHORT, to + done
            done += count
    return 0, 0


class PlacedFile:
    """An open object of a store; `path` is for messages. OSError becomes StoreFull or StoreError."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self._file = file
        #: None for what is in memory.
        self.fd = _descriptor(file)
        self._lock = threading.Lock()
        self._unsynced = 0

    def size(self) -> int:
        """Size in bytes."""
        try:
            if self.fd is not None:
                return os.fstat(self.fd).st_size
            with self._lock:
                return self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise store_error(self.path, error) from None

    def read_into(self, room: memoryview, offset: int) -> int:
        """Fill `room` from `offset`; the number of bytes, fewer only at the end of the file."""
        done = 0
        try:
            while done < len(room):
                if self.fd is not None:
                    count = os.preadv(self.fd, [room[done:]], offset + done)
                else:
                    with self._lock:
                        self._file.seek(offset + done)
                        part = self._file.read(len(room) - done)
                    count = len(part)
                    room[done : done + count] = part
                if not count:
                    break
                done += count
        except OSError as error:
            raise store_error(self.path, error) from None
        return done

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`. Now and then the kernel is asked to begin with the disk's part, so that
        little is left for sync."""
        if self.fd is not None:
            self._unsynced += len(data)
            if self._unsynced >= _BEHIND_BYTES:
                self._unsynced = 0
                _sync_file_range(self.fd, 0, 0, _START_WRITING)
        left = memoryview(data)
        try:
            while left:
                if self.fd is not None:
                    count = os.pwrite(self.fd, left, offset)
                else:
                    with self._lock:
                        self._file.seek(offset)
                        count = self._file.write(left)
                left = left[count:]
                offset += count
        except OSError as error:
            raise store_error(self.path, error) from None

    def sync(self) -> None:
        """fsync, where there is something to sync."""
        try:
            if self.fd is not None:
                os.fsync(self.fd)
            else:
                self._file.flush()
        except OSError as error:
            raise store_error(self.path, error) from None

    def close(self) -> None:
        """Close the file; twice is fine. On some file systems a full disk shows only here."""
        try:
            self._file.close()
        except OSError as error:
            raise store_error(self.path, error) from None
