"""How much a user may still write, where the kernel knows it.

quotactl_fd(2), Linux 5.14 and newer: ext4, XFS and others that keep quotas in the kernel. Lustre, GPFS and NFS do not
answer it: there a quota shows when a write fails, which fails the dump cleanly.
"""

from __future__ import annotations

import ctypes
import os
import struct

_QUOTACTL_FD = 443  # the same number on every architecture
_GETQUOTA = 0x800007
_BLOCK_BYTES = 1024  # if_dqblk counts limits in blocks of 1 KiB and space in bytes
_HARD, _SOFT, _SPACE = 0, 1, 2
_DQBLK = struct.Struct("<8QI4x")

_libc = ctypes.CDLL(None, use_errno=True)


def left_bytes(directory: str) -> int | None:
    """Bytes that the current user may still write below a directory, by his and his group's quota.

    None: no limit, or none that can be asked for. A soft limit counts like a hard one: dumps come without warning,
    and the grace time may be over.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = [_left(fd, kind, number) for kind, number in ((0, os.geteuid()), (1, os.getegid()))]
    finally:
        os.close(fd)
    limits = [left for left in found if left is not None]
    return min(limits) if limits else None


def _left(fd: int, kind: int, number: int) -> int | None:
    answer = ctypes.create_string_buffer(_DQBLK.size)
    command = _GETQUOTA << 8 | kind
    if _libc.syscall(_QUOTACTL_FD, fd, ctypes.c_uint(command), ctypes.c_uint(number), answer) != 0:
        return None
    values = _DQBLK.unpack(answer.raw)
    limits = [values[at] * _BLOCK_BYTES for at in (_HARD, _SOFT) if values[at]]
    return max(0, min(limits) - values[_SPACE]) if limits else None
