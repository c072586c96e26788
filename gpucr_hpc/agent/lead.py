"""What the agent of the batch host does for the whole job: begin it, hear Slurm's signals, see its end."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import (
    batchscript,
    checkpointing,
    claims,
    cloning,
    gpuword,
    peers,
    recipients,
    restarting,
    tasks,
)
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.metrics import METRICS
from gpucr_hpc.agent.phase import Decision, Phase, decide
from gpucr_hpc.agent.policy import cut_short, policy_of
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule.capsule import Identity, build, discard
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.errors import Busy, GpucrError, PermissionRefused, Refused, RunOver, SlurmError
from gpucr_hpc.log import Log
from gpucr_hpc.model import new_checkpoint_id

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

CAPSULE_DIED = 137  # as gpucr-task says it


def exit_code(status: int) -> int:
    """Exit code of a wait(2) status as a shell shows it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# --- other nodes ----------------------------------------------------------------------------------------


async def on_members(job: ProtectedJob, verb: str, **fields: Any) -> list[Any]:
    """Make a request of the agents of all other nodes of the job at once; answers by node rank from 1 on."""
    geometry = job.geometry
    if geometry is None or len(geometry.nodes) == 1:
        return []

    async def ask(rank: int) -> Any:
        assert geometry is not None
        async with job.context.connector.to(job.job, geometry.nodes[rank], geometry.addresses[rank]) as peer:
            return await peer.call(verb, **{"job": job.job, "run": job.run} | fields)

    return await peers.each(ask, list(range(1, len(geometry.nodes))))


async def discard_members(context: Context, job: str, geometry: Geometry, run: int) -> None:
    """Tell the other nodes that this run of the job is over; one that does not answer notices it from Slurm."""

    async def ask(rank: int) -> None:
        async with context.connector.to(job, geometry.nodes[rank], geometry.addresses[rank]) as peer:
            await peer.call("discard", job=job, run=run)

    try:
        await peers.each(ask, list(range(1, len(geometry.nodes))))
    except GpucrError as error:
        log.warning("a node was not told of the end", job=job, error=str(error))


def member_fields(job: ProtectedJob) -> dict[str, Any]:
    """What another node must know to build its capsule; it adds its own rank."""
    assert job.geometry is not None
    return {
        "uid": job.uid,
        "gid": job.gid,
        "groups": list(job.groups),
        "run": job.run,
        "names": list(job.geometry.names),
        "nodes": list(job.geometry.nodes),
        "addresses": list(job.geometry.addresses),
        "store_root": job.store_root,
        "excluded": job.excluded,
        "files": job.policy.files,
        "hide_io_uring": job.policy.hide_io_uring,
    }


# --- beginning ------------------------------------------------------------------------------------------


async def begin(job: ProtectedJob, supervisor: Supervisor) -> None:
    """First word of the batch supervisor in this run."""
    job.uid, job.gid, job.node_rank = supervisor.uid, supervisor.gid, 0
    restarted, owned = supervisor.hello.int("RESTART") > 0, False
    try:
        # A job that has run before must not begin again, or fail, only because slurmctld is away.
        info = await (restarting.ask(job, supervisor) if restarted else slurm.job(job.job))
        _check(job, info, supervisor)
        owned = True
        job.run = max(info.restarts, supervisor.hello.int("RESTART"))
        restarted = restarted or job.run > 0
        job.store_root = job.context.store_root(supervisor.hello.get("DIR"))
        job.policy = policy_of(supervisor.hello, job.context.config.agent)
        job.groups = Identity.of(supervisor.pid, job.uid, job.gid).groups
        job.shape = {"tasks": info.tasks, "cpus": info.cpus}
        job.script = await batchscript.path_of(supervisor.pid, job.context.node)
        await _take(job, supervisor, info)
        job.spawn(recipients.learn(job, supervisor))
    except Exception as error:
        if not isinstance(error, GpucrError | OSError):
            log.exception("unexpected")  # a fault of ours must not make a job start from its beginning
        log.error("job not taken", job=job.job, error=str(error))
        if isinstance(error, PermissionRefused) and not owned:
            job.supervisors.pop("batch", None)  # another user's: it has no say in what becomes of the job
            job.uid = job.gid = -1
            await supervisor.refuse(str(error), error.exit_code)
        elif isinstance(error, RunOver):
            # A node was lost: the job may need one that it was kept away from at its last move.
            job.spawn(slurm.forgive(job.job, job.excluded, job.run + 1))
            await supervisor.refuse("", 1)
        elif supervisor.restores and not restarted:
            code = error.exit_code if isinstance(error, GpucrError) else 1
            await supervisor.refuse(f"checkpoint {supervisor.restores} is not restored: {error}", code)
        elif restarted and (
            supervisor.restores
            or not isinstance(error, PermissionRefused | Refused)
            or await restarting.has_sets_elsewhere(job, supervisor)
        ):
            await restarting.give_up(job, supervisor, str(error))
        elif job.context.config.agent.when_unprotected == "fail":
            await supervisor.refuse(f"this job cannot be protected: {error}", 1)
        else:
            await supervisor.run_unprotected(f"this job runs without protection: {error}")


async def _take(job: ProtectedJob, supervisor: Supervisor, info: slurm.JobInfo) -> None:
    try:
        if job.run == 0 and job.policy.restore_from:
            await cloning.restore(job, supervisor, info)
        elif job.run == 0:
            await start(job, supervisor, info, cut_short(supervisor.hello, job.context.config.agent))
        else:
            await restarting.restart(job, supervisor, info)
    except BaseException:
        if job.geometry is not None:
            await discard_members(job.context, job.job, job.geometry, job.run)
        await discard(job.job, job.run_dir, job.capsule)
        job.capsule, job.phase, job.tasks = None, Phase.NEW, set()
        raise


def _check(job: ProtectedJob, info: slurm.JobInfo, supervisor: Supervisor) -> None:
    if info.uid != supervisor.uid:
        raise PermissionRefused(who=f"uid {supervisor.uid}", action=f"speak for job {job.job}")
    if info.is_het:
        raise Refused(reason="it is part of a heterogeneous job")
    if job.context.criu is None:
        raise job.context.criu_problem or Refused(reason="CRIU is not usable on this node")


async def geometry_of(info: slurm.JobInfo, names: tuple[str, ...] | None) -> Geometry:
    """The job's nodes in this run; names: those of its first run, None when this is it."""
    nodes = tuple(await slurm.hostnames(info.nodes))
    addresses = tuple(await slurm.node_addresses(list(nodes)))
    if names is not None and len(names) != len(nodes):
        raise Refused(reason=f"it was checkpointed on {len(names)} nodes and now has {len(nodes)}: use --nodes")
    return Geometry(names or nodes, nodes, addresses)


async def start(job: ProtectedJob, supervisor: Supervisor, info: slurm.JobInfo | None, message: str) -> None:
    """Start the job from its beginning: capsules on all nodes, then the batch script."""
    info = info or await slurm.job(job.job)
    job.geometry = await geometry_of(info, None)
    job.paths_of = job.job
    if job.run == 0:
        job.excluded = info.excluded_nodes
    job.run_dir.make(job.uid, job.gid)
    builder, *_ = await asyncio.gather(
        build(
            job.job,
            job.run_dir,
            Identity(job.uid, job.gid, job.groups),
            geometry=job.geometry,
            node_rank=0,
            config=job.context.config.network,
            hide_io_uring=job.policy.hide_io_uring,
        ),
        _note_first_run(job),
        on_members(job, "build", **member_fields(job)),
    )
    job.capsule = builder.capsule
    builder.place(supervisor.pid)
    job.set_phase(Phase.RUNNING)
    await job.steps.connect()
    job.keep_ready()
    log.info("capsule built", job=job.job, init_pid=job.capsule.init_pid, nodes=len(job.geometry.nodes))
    await tasks.start_task(job, supervisor, message)
    job.spawn(gpuword.watch(job))


async def _note_first_run(job: ProtectedJob) -> None:
    """Also the first touch of the store: a job whose store cannot be written learns it at its start."""
    async with job.worker() as worker:
        await Catalog(job.context, worker, job.store_root).first_run(job.job, new_checkpoint_id(), job.excluded)


async def without_capsule(job: ProtectedJob, supervisor: Supervisor) -> None:
    """A supervisor of an earlier agent, whose capsule is gone: its run must not begin again here."""
    job.uid, job.gid, job.run = supervisor.uid, supervisor.gid, supervisor.hello.int("RESTART")
    try:
        info = await slurm.job(job.job)
        _check(job, info, supervisor)
        job.store_root = job.context.store_root(supervisor.hello.get("DIR"))
        left = info.requeued or info.restarts > job.run
    except GpucrError as error:
        log.warning("whether the job has left is not known", job=job.job, error=str(error))
        left = False
    if left:
        await supervisor.release("")
    elif supervisor.hello.int("ATTACHED"):
        await supervisor.ok()  # it says ENDED, or learns from its shepherd that nothing is left
    else:
        await supervisor.refuse("the capsule of this job died", CAPSULE_DIED)


# --- Slurm's signals ------------------------------------------------------------------------------------


async def notice(job: ProtectedJob, supervisor: Supervisor, signal: int) -> None:
    """Slurm sent a signal to the batch supervisor; find out what it means and act."""
    arrived, notice_signal = time.monotonic(), supervisor.hello.int("SIGNAL")
    if job.phase in (Phase.LEAVING, Phase.REQUEUEING):
        await supervisor.absorb(signal)
        return
    try:
        info = await slurm.job(job.job)
        decision = decide(info, signal, notice_signal)
    except SlurmError as error:
        # Without an answer our own signal is taken for what it mostly is; others are the user's.
        log.warning("slurmctld does not answer", job=job.job, error=str(error))
        info, decision = None, Decision.REQUEUE if signal == notice_signal else Decision.FORWARD
    log.info("signal", job=job.job, signal=signal, decision=decision)
    if decision is Decision.FORWARD:
        await supervisor.forward(signal)
        return
    await supervisor.absorb(signal)
    if decision is not Decision.IGNORE:
        await _move(job, info, arrived)


async def step_notice(job: ProtectedJob, supervisor: Supervisor, signal: int) -> None:
    """A step's supervisor got a signal: the job's end, the step's, or the moment of a requeue, which the batch
    supervisor hears of too."""
    try:
        info = await slurm.job(job.job)
    except SlurmError:
        await supervisor.forward(signal)
        return
    if info.being_preempted or info.requeued:
        await supervisor.absorb(signal)
    else:
        await supervisor.forward(signal)


async def missed(job: ProtectedJob) -> None:
    """Take up again what an earlier agent had been told to do: Slurm tells it only once."""
    arrived, info = time.monotonic(), await slurm.job(job.job)
    if info.being_preempted or info.requeued:
        await _move(job, info, arrived)


async def _move(job: ProtectedJob, info: slurm.JobInfo | None, since: float) -> None:
    try:
        await checkpoint(job, "preempt", leave=True, info=info, since=since)
    except Busy:
        pass
    except GpucrError as error:
        log.error("checkpoint failed", job=job.job, error=str(error))


async def checkpoint(
    job: ProtectedJob,
    reason: str,
    *,
    leave: bool,
    hold: bool = False,
    full: bool = False,
    info: slurm.JobInfo | None = None,
    since: float | None = None,
) -> dict[str, Any]:
    """Take a checkpoint; with leave the job is requeued after it, with hold also held; full: without references to
    earlier ones. Returns the report of it.

    One that is under way and after which the job would go on is given up for one with which it leaves. Raises Busy when
    one is under way otherwise, else what went wrong, the job running on.
    """
    if leave:
        await job.stop_sealing()
    if job.phase is not Phase.RUNNING or job.capsule is None:
        raise Busy(job=job.job, operation=f"{job.phase}")
    if job.node_rank != 0 or job.geometry is None:
        first = job.geometry.nodes[0] if job.geometry else "its first node"
        raise Refused(reason=f"the agent on {first} leads job {job.job}: ask there")
    try:
        report = await checkpointing.checkpoint(job, reason, leave=leave, hold=hold, full=full, info=info, since=since)
    except GpucrError:
        METRICS.checkpoint(reason, None)
        raise
    METRICS.checkpoint(reason, report)
    return report


# --- the end --------------------------------------------------------------------------------------------


async def ended(job: ProtectedJob, supervisor: Supervisor, status: int, noticed: bool) -> None:
    """The batch task ended by itself. A record keeps Slurm's requeue at a grace time's end from running it
    again; a job that ended well needs its checkpoints no more."""
    await job.stop_sealing()
    try:
        if not noticed:
            noticed = (await slurm.job(job.job)).being_preempted
        async with job.worker() as worker:
            catalog = Catalog(job.context, worker, job.store_root)
            if noticed:
                await catalog.ended(job.job, job.run, status)
            await supervisor.ok()
            if status == 0:
                await catalog.retire(job.job)
                if job.paths_of != job.job:
                    await claims.release(catalog, job.paths_of, job.job)
    except GpucrError as error:
        log.error("end not recorded", job=job.job, error=str(error))
        await supervisor.ok()
