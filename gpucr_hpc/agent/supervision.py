"""The supervisors of a job's tasks on this node: what they say and what they are told."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from gpucr_hpc import wire
from gpucr_hpc.agent import lead, tasks
from gpucr_hpc.agent.phase import AT_WORK, Phase
from gpucr_hpc.agent.steps import LAUNCH_VARIABLE, StepOnNode, environment_of
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule.processes import start_time, wait_gone
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_LOOK_INTERVAL_S = 0.1


# --- HELLO ------------------------------------------------------------------------------------------------


async def hello(job: ProtectedJob, supervisor: Supervisor) -> None:
    """A supervisor is there: start its task, attach it, or tell it to go."""
    if supervisor.key == "batch":
        await _end_earlier_run(job, supervisor)
        async with job.turn:
            job.supervisors["batch"] = supervisor
            job.batch = [supervisor.pid, start_time(supervisor.pid)]
            await _hello_batch(job, supervisor)
    else:  # no turn: a restore, begun by the batch supervisor's word, waits for these
        await _hello_step(job, supervisor)
    await job.arrived()


async def _end_earlier_run(job: ProtectedJob, supervisor: Supervisor) -> None:
    """Remove what an earlier run has left here, as lead or as member: its capsule is not that of the new run."""
    if supervisor.hello.int("RESTART") <= job.run:
        return
    # It is being undone, or leaves: Slurm's KillWait ends supervisors while another node's agent is waited for.
    while job.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING, Phase.LEAVING) and supervisor.lives():
        await asyncio.sleep(_LOOK_INTERVAL_S)
    await job.clear()


async def _hello_batch(job: ProtectedJob, supervisor: Supervisor) -> None:
    again = supervisor.hello.get("MODE") == "again"
    if job.phase is Phase.LEAVING:
        await supervisor.release("")
    elif job.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING):
        pass  # the end of the checkpoint tells it what to do
    elif job.capsule is not None and job.capsule.alive():
        job.save()
        await _admit(job, supervisor)
        if supervisor.hello.int("NOTICE"):
            job.spawn(lead.notice(job, supervisor, supervisor.hello.int("NOTICE")))
        elif again:
            job.spawn(lead.missed(job))
    elif again:
        await lead.without_capsule(job, supervisor)
    else:
        await lead.begin(job, supervisor)


async def _hello_step(job: ProtectedJob, supervisor: Supervisor) -> None:
    """The supervisor of a step's task. Its key must be one that was announced to this node."""
    key, rank = supervisor.hello.get("STEP"), supervisor.hello.int("RANK")
    step = job.steps.on_node.get(key)
    if job.phase is Phase.LEAVING:
        await supervisor.release("")
        return
    if step is None or job.capsule is None or not _of_launch(supervisor.pid, step):
        await supervisor.refuse("this step does not belong to a protected job on this node", 1)
        return
    if rank in step.ended:
        await supervisor.refuse("", lead.exit_code(step.ended[rank]))
        return
    with_tasks = _environment(supervisor.pid).get("SLURM_STEP_NUM_TASKS", "")
    step.tasks = int(with_tasks) if with_tasks.isdigit() else step.tasks
    job.supervisors[supervisor.key] = supervisor
    if job.phase in AT_WORK:
        await _admit(job, supervisor)


def _of_launch(pid: int, step: StepOnNode) -> bool:
    """Whether a supervisor belongs to the step's present srun, not to one of a restore that was given up."""
    return not step.launch or _environment(pid).get(LAUNCH_VARIABLE) == step.launch


def _environment(pid: int) -> dict[str, str]:
    """That of a process, empty when it has ended."""
    try:
        return environment_of(pid)
    except OSError:
        return {}


async def _admit(job: ProtectedJob, supervisor: Supervisor) -> None:
    """The capsule runs: the supervisor is attached already, its task waits for it, or is to be started."""
    if supervisor.hello.int("ATTACHED"):
        await supervisor.ok()
    else:
        await tasks.take_up(job, supervisor, "", restored=False)


# --- frames of a running supervisor, and its end ------------------------------------------------------------


async def frame(job: ProtectedJob, supervisor: Supervisor, frame: wire.Frame) -> None:
    """Anything a supervisor says after HELLO."""
    if frame.type is wire.Type.PLACE:
        await job.place(supervisor, frame.int("PID"), whole_tree=False)
        await supervisor.placed(frame.get("TASK"))
    elif frame.type is wire.Type.NOTICE:
        if supervisor.key == "batch":
            job.spawn(lead.notice(job, supervisor, frame.int("SIGNAL")))
        elif job.leaving:
            await supervisor.absorb(frame.int("SIGNAL"))
        else:
            job.spawn(lead.step_notice(job, supervisor, frame.int("SIGNAL")))
    elif frame.type is wire.Type.ENDED:
        if supervisor.key == "batch":
            job.spawn(lead.ended(job, supervisor, frame.int("STATUS"), bool(frame.int("NOTICE"))))
        else:
            step = job.steps.on_node.get(supervisor.hello.get("STEP"))
            if step is not None:
                step.ended[supervisor.hello.int("RANK")] = frame.int("STATUS")
                job.save()
            await supervisor.ok()


async def gone(job: ProtectedJob, supervisor: Supervisor) -> None:
    """A supervisor's connection ended. The end of the batch script's is the end of the job here."""
    known = job.supervisors.get(supervisor.key) is supervisor  # and not one that was sent away
    if known:
        del job.supervisors[supervisor.key]
    if supervisor.key == "batch":
        job.spawn(job.watch())
        return
    if known and job.phase is Phase.RESTORING:
        await job.step_failed(f"the supervisor of task {supervisor.key} on {job.context.node} ended")
    if not job.supervisors and job.phase in AT_WORK and job.capsule is not None and not job.capsule.alive():
        job.spawn(job.discard())  # the batch supervisor has gone before, when a checkpoint was under way
        return
    job.spawn(_task_lost(job, supervisor))


async def _task_lost(job: ProtectedJob, supervisor: Supervisor) -> None:
    """A step's supervisor that was killed has told nothing of its task: for Slurm that is dead, so it must end."""
    await wait_gone(supervisor.pid)
    while job.phase in (Phase.CHECKPOINTING, Phase.REQUEUEING, Phase.RESTORING):
        await asyncio.sleep(_LOOK_INTERVAL_S)
    key, rank = supervisor.hello.get("STEP"), supervisor.hello.int("RANK")
    step = job.steps.on_node.get(key)
    if job.phase not in AT_WORK or job.capsule is None or supervisor.key in job.supervisors:
        return
    if step is None or rank in step.ended or supervisor.key not in job.tasks:
        return
    log.warning("supervisor was killed, its task ends", job=job.job, task=supervisor.key)
    step.ended[rank] = signal.SIGKILL
    job.save()
    try:
        channel = await wire.connect(job.run_dir.shepherd_socket)
    except OSError:
        return  # the capsule has ended
    await channel.send(wire.make(wire.Type.SIGNAL, TASK=supervisor.key, SIGNAL=int(signal.SIGKILL)))
    channel.close()
