"""How supervisors come to their tasks: they start them in the capsule, or take over the stdio of those that run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gpucr_hpc.agent.report import PROGRESS_FILE
from gpucr_hpc.agent.steps import environment_of
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule.network import Geometry

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

# What makes programs avoid things that cannot be saved, at no cost; a user's own value stays.
_DUMPABLE = {
    "GODEBUG": "multipathtcp=0",  # Go's servers would listen with MPTCP
    "USE_LIBUV": "0",  # PyTorch's TCPStore would use io_uring
}


async def take_up(job: ProtectedJob, supervisor: Supervisor, message: str, *, restored: bool) -> None:
    """Let a supervisor take over the stdio of its running task, or start the task: a step may begin while its tree
    stands still or is being restored."""
    if supervisor.key in job.tasks:
        await supervisor.attach(job.run_dir.shepherd_socket, message, restored=restored)
        return
    with contextlib.suppress(OSError):  # it has ended, which its connection will tell
        await start_task(job, supervisor, message)


async def start_task(job: ProtectedJob, supervisor: Supervisor, message: str) -> None:
    """Let a supervisor start its task in the capsule."""
    step = job.steps.on_node.get(supervisor.hello.get("STEP"))
    await supervisor.start(
        job.run_dir.shepherd_socket,
        _env(job, supervisor.pid),
        message,
        stdio=step.stdio if step else "",
        token=step.token if step else "",
    )
    job.tasks.add(supervisor.key)  # not before: a supervisor that has heard START ignores a second one
    job.save()


def _env(job: ProtectedJob, pid: int) -> dict[str, str]:
    """Variables that a task gets besides its own: the job's names for its nodes, not those of this run."""
    env = {"GPUCR_CAPSULE": job.job, "GPUCR_SHEPHERD": job.run_dir.shepherd_socket}
    env["GPUCR_PROGRESS"] = PROGRESS_FILE
    own = environment_of(pid)
    env |= {k: v for k, v in _DUMPABLE.items() if k not in own}
    if job.geometry is not None and job.geometry.names != job.geometry.nodes:
        env |= {k: v for k, v in virtual_names(job.geometry, job.node_rank).items() if k in own}
    return env


def virtual_names(geometry: Geometry, node_rank: int) -> dict[str, str]:
    """Slurm's variables that name nodes, with the job's own names."""
    names = ",".join(geometry.names)
    own = geometry.names[node_rank]
    return {
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_STEP_NODELIST": names,
        "SLURMD_NODENAME": own,
        "SLURM_TOPOLOGY_ADDR": own,
        "HOSTNAME": own,
    }
