"""Files of the job's user, which the worker changes and reads as that user.

Who calls: worker.
"""

from __future__ import annotations

import base64
import os
import stat
from typing import Any

from gpucr_hpc.engine.openfiles import OpenFile, grown, put_back, set_aside
from gpucr_hpc.errors import KeyFileError, RestoreFailed


class UserFileVerbs:
    """Mixed into Worker; its methods are verbs of the agent's orders."""

    def do_grown(self, files: list[dict[str, Any]]) -> list[str]:
        """Lines about files that grew since a checkpoint; this worker then runs as the job's user."""
        return grown([OpenFile(**file) for file in files])

    def do_set_aside(self, files: list[dict[str, Any]], suffix: str) -> list[tuple[str, str, int]]:
        """Cut files that grew since a checkpoint; this worker then runs as the job's user."""
        try:
            return set_aside([OpenFile(**file) for file in files], suffix)
        except OSError as error:
            reason = f"{error.filename}: cannot be rolled back: {error.strerror}"
            raise RestoreFailed(reason=reason, log="none") from None

    def do_put_back(self, tails: list[tuple[str, str, int]]) -> None:
        """Append the tails to their files again; this worker then runs as the job's user."""
        try:
            put_back(tails)
        except OSError as error:
            reason = f"{error.filename}: its tail cannot be put back: {error.strerror}"
            raise RestoreFailed(reason=reason, log="none") from None

    def do_read(self, path: str, limit_bytes: int) -> str | None:
        """A small file of the user as whom this worker runs, base64, or None when there is none."""
        try:
            return base64.b64encode(read_own(path, limit_bytes)).decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KeyFileError(path=path, reason=error.strerror) from None


def read_own(path: str, limit_bytes: int) -> bytes:
    """Content of a regular file that belongs to the current user and that no other may write. Raises OSError,
    KeyFileError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise KeyFileError(path=path, reason="not a regular file of the user that only he may write")
        if status.st_size > limit_bytes:
            raise KeyFileError(path=path, reason=f"has {status.st_size} bytes, more than {limit_bytes}")
        return os.read(fd, limit_bytes)
    finally:
        os.close(fd)
