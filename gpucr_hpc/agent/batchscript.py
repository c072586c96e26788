"""The batch script as the job has it open: a new job that goes on from its checkpoint needs it at its old path."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from gpucr_hpc import slurm
from gpucr_hpc.errors import SlurmError
from gpucr_hpc.log import Log

log = Log(__name__)

SCRIPT_STREAM = "batch-script"
_MOST_BYTES = 16 << 20  # Slurm's own limit is 4 MiB by default (max_script_size)


async def path_of(supervisor_pid: int, node: str) -> str:
    """Where slurmd has put the script that a batch supervisor was started with; "" when that cannot be told.

    Only a path in slurmd's own directory counts: at a restore that directory is covered, and no user may name another.
    """
    command = Path(f"/proc/{supervisor_pid}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    path = command[command.index("--") + 1] if "--" in command else ""
    try:
        spool = (await slurm.config()).get("slurmdspooldir", "")
    except SlurmError as error:
        log.warning("the batch script is not known", node=node, error=str(error))
        return ""
    spool = spool.replace("%n", node).replace("%h", os.uname().nodename.partition(".")[0])
    return path if re.fullmatch(re.escape(spool) + r"/job\d+/slurm_script", path) else ""


def read(path: Path, uid: int) -> tuple[bytes, int] | None:
    """Content and mode of a script, None when it is none: a regular file of the user or of root. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, uid) or status.st_size > _MOST_BYTES:
            return None
        return file.read(_MOST_BYTES), stat.S_IMODE(status.st_mode)
