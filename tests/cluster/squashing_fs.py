"""A file system that squashes root, as NFS does as a rule: requests of uid 0 have the rights of nobody.

As a program: squashing_fs.py BACKING MOUNT_POINT; it answers the kernel's FUSE requests (linux/fuse.h, 7.31) with what
is in a directory. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

_HEADER = struct.Struct("<IIQQIIII")
_ANSWER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_NOBODY = 65534
_MAX_WRITE = 1 << 17
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _READLINK, _MKDIR, _UNLINK, _RMDIR = 1, 2, 3, 4, 5, 9, 10, 11
_RENAME, _LINK, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC, _FLUSH = 12, 13, 14, 15, 16, 17, 18, 20, 25
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _CREATE, _BATCH_FORGET = 26, 27, 28, 29, 34, 35, 42


class Squashing:
    """Serves one mount. Node numbers are places in a table of paths below the backing directory."""

    def __init__(self, backing: str) -> None:
        self.paths = ["", backing]
        self.numbers = {backing: 1}

    def number(self, path: str) -> int:
        if path not in self.numbers:
            self.numbers[path] = len(self.paths)
            self.paths.append(path)
        return self.numbers[path]

    @staticmethod
    def may(path: str, uid: int, gid: int, mask: int) -> None:
        """Raise OSError unless this user, or nobody in root's place, has the rights of `mask` (rwx as 4, 2, 1)."""
        uid, gid = (uid or _NOBODY), (gid if uid else _NOBODY)
        status = os.lstat(path)
        shift = 6 if uid == status.st_uid else 3 if gid == status.st_gid else 0
        if status.st_mode >> shift & mask != mask:
            raise PermissionError(errno.EACCES, "squashed", path)

    @staticmethod
    def attributes(status: os.stat_result) -> bytes:
        times = [status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns]
        return _ATTR.pack(
            *(status.st_ino, status.st_size, status.st_blocks, *(t // 10**9 for t in times)),
            *(*(t % 10**9 for t in times), status.st_mode, status.st_nlink, status.st_uid, status.st_gid),
            *(status.st_rdev, 4096, 0),
        )

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(os.lstat(path))
        return struct.pack("<4Q2I", self.number(path), 0, 0, 0, 0, 0) + attributes  # valid for no time at all

    def child(self, node: int, name: bytes, uid: int, gid: int, mask: int = 1) -> str:
        directory = self.paths[node]
        self.may(directory, uid, gid, mask)
        return os.path.join(directory, os.fsdecode(name.rstrip(b"\0")))

    def answer(self, op: int, node: int, uid: int, gid: int, body: bytes) -> bytes | None:
        """What the kernel is told; None for what has no answer."""
        path = self.paths[node] if 0 < node < len(self.paths) else ""
        if op in (_FORGET, _BATCH_FORGET):
            return None
        if op == _INIT:
            flags = 1 << 5  # FUSE_BIG_WRITES
            return struct.pack("<4I2H2I2HI7I", 7, 31, 1 << 17, flags, 16, 12, _MAX_WRITE, 1, 32, 0, 0, *[0] * 7)
        if op == _LOOKUP:
            return self.entry(self.child(node, body, uid, gid))
        if op == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(os.lstat(path))
        if op == _SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            mode, _, owner, group = struct.unpack_from("<4I", body, 68)
            if valid & 8:
                self.may(path, uid, gid, 2)
                os.truncate(path, size)
            if valid & 7:
                if (uid or _NOBODY) != os.lstat(path).st_uid:
                    raise PermissionError(errno.EPERM, "squashed", path)
                if valid & 1:
                    os.chmod(path, stat.S_IMODE(mode))
                if valid & 6:
                    os.lchown(path, owner if valid & 2 else -1, group if valid & 4 else -1)
            return struct.pack("<QII", 0, 0, 0) + self.attributes(os.lstat(path))
        if op == _READLINK:
            return os.fsencode(os.readlink(path))
        if op in (_OPEN, _OPENDIR):
            (flags,) = struct.unpack_from("<I", body)
            wanted = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6}[flags & os.O_ACCMODE]
            self.may(path, uid, gid, wanted)
            flags &= ~(os.O_APPEND | os.O_CREAT | os.O_EXCL)
            handle = os.open(path, flags) if op == _OPEN else 0
            return struct.pack("<QII", handle, 0, 0)
        if op == _CREATE:
            flags, mode = struct.unpack_from("<II", body)
            made = self.child(node, body[16:], uid, gid, 3)
            handle = os.open(made, (flags | os.O_CREAT) & ~os.O_APPEND, mode & 0o7777)
            os.fchown(handle, uid or _NOBODY, gid if uid else _NOBODY)
            return self.entry(made) + struct.pack("<QII", handle, 0, 0)
        if op == _READ:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(handle, size, offset)
        if op == _WRITE:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)
        if op == _READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            out = b""
            for place, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
                raw = os.fsencode(name)
                record = struct.pack("<QQII", 1, place, len(raw), 0) + raw + bytes(-len(raw) % 8)
                if len(out) + len(record) > size:
                    break
                out += record
            return out
        if op == _MKDIR:
            (mode,) = struct.unpack_from("<I", body)
            made = self.child(node, body[8:], uid, gid, 3)
            os.mkdir(made, mode & 0o7777)
            os.chown(made, uid or _NOBODY, gid if uid else _NOBODY)
            return self.entry(made)
        if op in (_UNLINK, _RMDIR):
            (os.unlink if op == _UNLINK else os.rmdir)(self.child(node, body, uid, gid, 3))
            return b""
        if op == _RENAME:
            (target,) = struct.unpack_from("<Q", body)
            old, new = body[8:].split(b"\0")[:2]
            os.rename(self.child(node, old, uid, gid, 3), self.child(target, new, uid, gid, 3))
            return b""
        if op == _ACCESS:
            (mask,) = struct.unpack_from("<I", body)
            self.may(path, uid, gid, mask & 7)
            return b""
        if op == _STATFS:
            return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0, *[0] * 6)
        if op in (_RELEASE, _FSYNC, _FLUSH, _RELEASEDIR):
            if op == _RELEASE:
                os.close(struct.unpack_from("<Q", body)[0])
            return b""
        raise OSError(errno.ENOSYS, "not here")

    def serve(self, device: int) -> None:
        """Until it is unmounted."""
        while True:
            try:
                data = os.read(device, _MAX_WRITE + (1 << 16))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue  # ENOENT: the request was interrupted
            _, op, unique, node, uid, gid, _, _ = _HEADER.unpack_from(data)
            failed, out = 0, b""
            try:
                made = self.answer(op, node, uid, gid, data[_HEADER.size :])
                if made is None:
                    continue
                out = made
            except OSError as error:
                failed = -(error.errno or errno.EIO)
            os.write(device, _ANSWER.pack(_ANSWER.size + len(out), failed, unique) + out)


def main() -> None:
    backing, place = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"squashing", place.encode(), b"fuse.squashing", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    if os.fork():
        os._exit(0)
    os.setsid()
    Squashing(backing).serve(device)


if __name__ == "__main__":
    main()
