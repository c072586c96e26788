"""Who else may read a job's checkpoints: recipients of the site, from its configuration, and of the user.

The user's file is read once in each run of the job, as the user and by a process that is he: root follows no link and
opens no path of a user's choice. A recipient that cannot be used never keeps a job from being checkpointed.
"""

from __future__ import annotations

import base64
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.config import KeysConfig
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, KeyFileError
from gpucr_hpc.image import recipients
from gpucr_hpc.image.keyfiles import read_public
from gpucr_hpc.image.recipients import Recipient
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)


def of_site(config: KeysConfig) -> tuple[list[Recipient], list[GpucrError]]:
    """The configured recipients, read anew so that a renewed certificate needs no restart; and what is wrong."""
    found: dict[str, Recipient] = {}
    problems: list[GpucrError] = []
    for path in config.recipients:
        try:
            for recipient in recipients.parse(read_public(path), path):
                found.setdefault(recipient.key_id, recipient)
        except GpucrError as error:
            problems.append(error)
    return list(found.values()), problems


def of_job(job: ProtectedJob) -> list[Recipient]:
    """Everybody besides the site for whom a checkpoint of this job is sealed; what cannot be used is logged."""
    found, problems = of_site(job.context.config.keys)
    if job.user_recipients:
        try:
            found += recipients.parse(job.user_recipients.encode(), "the user's recipients")
        except GpucrError as error:  # a certificate that ended since the job's start
            problems.append(error)
    for problem in problems:
        log.error("recipient left out", job=job.job, error=str(problem))
    return list({recipient.key_id: recipient for recipient in found}.values())


async def learn(job: ProtectedJob, supervisor: Supervisor) -> None:
    """Read the user's file, if there is one; a bad one is named in the job's output and not used."""
    name = job.context.config.keys.user_recipients
    if not name:
        return
    try:
        path = Path(pwd.getpwuid(job.uid).pw_dir) / name
        async with WorkerClient(job.store_root, job.uid, job.gid) as worker:
            content = await worker.call("read", path=os.fspath(path), limit_bytes=recipients.MAX_FILE_BYTES)
        if content is None:
            return
        data = base64.b64decode(content)
        found = recipients.parse(data, path)
        job.user_recipients = data.decode("ascii")
        job.save()
        log.info("recipients", job=job.job, keys=",".join(r.key_id for r in found))
    except (KeyError, UnicodeDecodeError):
        log.info("no recipients of the user", job=job.job, uid=job.uid)
    except GpucrError as error:
        log.warning("recipients not used", job=job.job, error=str(error))
        if isinstance(error, KeyFileError):
            await supervisor.print(f"recipients of checkpoints not used: {error}")
