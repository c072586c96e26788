"""Mounts and namespaces by their system calls: the standard library has none of them before Python 3.12.

Only the lab's nodes and boxes use this; it is std-only so that a bare Debian can run it.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20
MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    args = [value.encode() if value else None for value in (source, target, kind)]
    _check(_libc.mount(*args, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {target}")


def bind(source: str, target: str, *, recursive: bool = False, read_only: bool = False) -> None:
    """Bind mount; read-only takes a second call (the first ignores the flag)."""
    mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def detach(target: str) -> None:
    """umount2(2) with MNT_DETACH: the mount and those below it leave the namespace at once, also when in use."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def unshare(flags: int) -> None:
    """unshare(2). With CLONE_NEWPID only children made afterwards are in the new namespace."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def pivot_root(new_root: str) -> None:
    """Make new_root (a mount point) the root; the old one is gone from this mount namespace afterwards.

    The old root is put on top of the new one and detached at once, so no directory for it is needed
    (pivot_root(2), "pivot_root(".", ".")").
    """
    os.chdir(new_root)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    detach(".")
    os.chdir("/")
