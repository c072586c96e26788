"""Memory that is used again, and the few things done in it without a copy and without the interpreter's lock.

Who calls: chunks, writer, reader. A fresh megabyte costs more (256 page faults, and the kernel's lock on the address
space) than what is done in it: LZ4 into fresh memory reaches a fifth of its speed, and less with every thread.
`scripts/measure_image --primitives` measures both. The package lz4 has no call that writes into given memory, so the
library is called through ctypes where the system has it (Debian's dpkg and systemd need it), else the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import lz4.block

_libc = ctypes.CDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset = _libc.memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memmove = _libc.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
_vmsplice.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint)
_vmsplice.restype = ctypes.c_ssize_t


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


T = TypeVar("T")

_LITTLE_BYTES = 16 << 10
_SLAB_BYTES = 64 << 20


class Buffer:
    """`size` bytes from a page's beginning on; view: all of them; address: where they lie, for the buffer's lifetime.

    A mapping of its own: its pages may be in a pipe still when it is dropped, and stay whole there.
    """

    __slots__ = ("_hold", "address", "size", "view")

    def __init__(self, size: int, memory: mmap.mmap | None = None, at: int = 0) -> None:
        if memory is None:
            memory = _mapping(size)
        self._hold = (ctypes.c_char * size).from_buffer(memory, at)
        self.address, self.size, self.view = ctypes.addressof(self._hold), size, memoryview(memory)[at : at + size]


def _mapping(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Pool:
    """Buffers of one size that wait to be used again, at most `limit` of them."""

    def __init__(self, size: int, limit: int) -> None:
        self._size, self._limit = size, limit
        self._free: list[Buffer] = []

    def take(self) -> Buffer:
        """A buffer with any content."""
        try:
            return self._free.pop()
        except IndexError:
            return Buffer(self._size)

    def reserve(self, count: int) -> None:
        """Have `count` buffers ready whose pages are there already, in as few and large pages as the kernel gives."""
        while count > 0:
            some = min(count, max(1, _SLAB_BYTES // self._size))
            memory = _mapping(some * self._size)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            new = [Buffer(self._size, memory, number * self._size) for number in range(some)]
            _memset(new[0].address, 0, some * self._size)
            self._free += new
            count -= some

    def adopt(self, memory: mmap.mmap, begin: int) -> None:
        """Have buffers ready that lie in other memory, from `begin` to its end: they are taken first."""
        self._free += [Buffer(self._size, memory, at) for at in range(begin, len(memory) - self._size + 1, self._size)]

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back that nobody uses any more."""
        if len(self._free) < self._limit:
            self._free.append(buffer)


class PerThread(Generic[T]):
    """One thing of a kind for each thread that asks."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def get(self) -> T:
        """This thread's."""
        try:
            mine: T = self._local.mine
        except AttributeError:
            mine = self._local.mine = self._make()
        return mine


def lend(fd: int, buffer: Buffer, at: int, size: int) -> int:
    """Put pages of a buffer into a pipe without a copy: the bytes taken, from `at` on.

    Until the pipe's reader has taken them the buffer must not be written to. OSError as from vmsplice(2).
    """
    part = _Range(buffer.address + at, size)
    taken: int = _vmsplice(fd, ctypes.byref(part), 1, 0)
    if taken < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return taken


def copy(source: Buffer, at: int, size: int, target: Buffer, to: int) -> None:
    """Copy `size` bytes between two buffers."""
    _memmove(target.address + to, source.address + at, size)


def copy_out(source: Buffer, size: int, target: memoryview) -> None:
    """Copy a buffer's first bytes to the beginning of other memory, which can be written to."""
    if size > len(target):
        raise ValueError(f"{size} bytes do not fit into {len(target)}")
    _memmove(address_of(target), source.address, size)


def address_of(memory: memoryview) -> int:
    """Where memory lies that can be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def equal(one: Buffer, at: int, other: Buffer, size: int) -> bool:
    """Whether `size` bytes of one from `at` on are those at the beginning of the other."""
    return not _memcmp(one.address + at, other.address, size)


class _System:
    """liblz4."""

    def __init__(self) -> None:
        library = ctypes.CDLL("liblz4.so.1")
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        self._compress = library.LZ4_compress_fast
        self._compress.argtypes = kinds
        # A sample takes less time than giving the interpreter's lock away and getting it back.
        self._compress_little = ctypes.PyDLL("liblz4.so.1").LZ4_compress_fast
        self._compress_little.argtypes = kinds
        self._decompress = library.LZ4_decompress_safe
        self._decompress.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

    def compress(self, source: Buffer, at: int, size: int, target: Buffer, limit: int) -> int:
        call = self._compress if size > _LITTLE_BYTES else self._compress_little
        return int(call(source.address + at, target.address, size, limit, 1))

    def decompress(self, source: Buffer, size: int, target: Buffer, plain_bytes: int) -> int:
        return int(self._decompress(source.address, target.address, size, plain_bytes))


class _Package:
    """The Python package, through fresh memory."""

    def compress(self, source: Buffer, at: int, size: int, target: Buffer, limit: int) -> int:
        packed = lz4.block.compress(source.view[at : at + size], store_size=False)
        if len(packed) > limit:
            return 0
        target.view[: len(packed)] = packed
        return len(packed)

    def decompress(self, source: Buffer, size: int, target: Buffer, plain_bytes: int) -> int:
        try:
            plain = lz4.block.decompress(source.view[:size], uncompressed_size=plain_bytes)
        except lz4.block.LZ4BlockError:
            return -1
        target.view[: len(plain)] = plain
        return len(plain)


def _library() -> _System | _Package:
    try:
        return _System()
    except (OSError, AttributeError):
        return _Package()


_lz4 = _library()


def compress(source: Buffer, at: int, size: int, target: Buffer, limit: int) -> int:
    """LZ4 block of `size` bytes of source from `at` on into target; its length, or 0 when it is more than `limit`."""
    return _lz4.compress(source, at, size, target, limit)


def decompress(source: Buffer, size: int, target: Buffer, plain_bytes: int) -> bool:
    """The block in the first `size` bytes of source into target; False when it does not give `plain_bytes` bytes."""
    return plain_bytes <= target.size and _lz4.decompress(source, size, target, plain_bytes) == plain_bytes
