"""A job that Slurm has started again: go on from its newest good checkpoint, or say why not."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from gpucr_hpc import faults, slurm
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule import build, network
from gpucr_hpc.capsule.capsule import Identity, discard
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine import stream
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, RestoreFailed
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest
from gpucr_hpc.units import format_duration

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

HELD_EXIT_CODE = 125


def exit_code(status: int) -> int:
    """Exit code of a wait(2) status as a shell shows it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


async def restart(job: ProtectedJob, supervisor: Supervisor) -> None:
    """Decide how a restarted job goes on, and let it. Raises what keeps a good checkpoint from coming back."""
    job.run_dir.make(job.uid, job.gid)
    worker = job.worker()
    try:
        await worker.start(job.run_dir.images, stream.SERVE_SOCKET)
        catalog = Catalog(job.context, worker, job.store_root)
        job.excluded = await catalog.excluded(job.job)
        ended = await catalog.ended_before(job.job, job.run)
        if ended is not None:
            job.run_dir.remove()
            await supervisor.refuse(
                f"the job ended by itself with status {exit_code(ended)} while it was being preempted; "
                "it is not run again",
                exit_code(ended),
            )
            return
        candidates, problems = await catalog.candidates(job.job, job.uid)
        for problem in problems:
            log.warning("checkpoint not usable", job=job.job, problem=problem)
            await supervisor.print(problem)
        for manifest in candidates:
            try:
                await _restore(job, supervisor, worker, catalog, manifest)
                return
            except RestoreFailed:
                raise  # an older set would lose work and most likely fail alike
            except GpucrError as error:
                problems.append(str(error))
                log.warning("checkpoint not usable", job=job.job, problem=str(error))
                await supervisor.print(f"checkpoint {manifest.checkpoint} is not used: {error}")
    finally:
        await worker.close()
    if problems:
        raise RestoreFailed(reason=problems[-1], log="the agent's journal")
    await job.start_fresh(supervisor, "no checkpoint was made yet, the job starts from its beginning")


async def _restore(
    job: ProtectedJob, supervisor: Supervisor, worker: WorkerClient, catalog: Catalog, manifest: Manifest
) -> None:
    start, context, meta = time.monotonic(), job.context, manifest.meta
    assert context.criu is not None
    engine.check_host(meta, context.criu)
    await worker.call(
        "serve",
        job=job.job,
        checkpoint=manifest.checkpoint,
        entry=manifest.image(0).as_dict(),
        key=catalog.key_of(manifest),
    )
    await _roll_back_files(job, supervisor, manifest)
    job.set_phase(Phase.RESTORING)
    faults.reach("before restore")
    builder = await build(
        job.job,
        job.run_dir,
        Identity.of(supervisor.pid, job.uid, job.gid),
        hostname=meta["node"],
        node_rank=0,
        config=context.config.network,
        restore_above=engine.restore_above(meta),
    )
    try:
        job.capsule, job.tasks = builder.capsule, {task["key"] for task in meta["tasks"]}
        job.save()
        faults.reach("after build")
        job.capsule = await engine.restore(builder, job.run_dir, worker, meta, context.config.engine)
        faults.reach("after restore")
    except BaseException:
        await asyncio.shield(discard(job.job, job.run_dir, builder.capsule))
        raise
    await network.unlock(job.job)
    faults.reach("after unlock")
    took_s = time.monotonic() - start
    job.last = {"restored": manifest.checkpoint, "restore_s": round(took_s, 4), "from_node": meta["node"]}
    job.set_phase(Phase.RUNNING)
    log.info("restored", job=job.job, checkpoint=manifest.checkpoint, node=context.node, took_s=took_s)
    await supervisor.attach(
        job.run_dir.shepherd_socket,
        f"restored on {context.node} from checkpoint {manifest.checkpoint} of {meta['node']} "
        f"in {format_duration(took_s)}",
    )


async def _roll_back_files(job: ProtectedJob, supervisor: Supervisor, manifest: Manifest) -> None:
    """Files that were written to after the checkpoint get their size of then; as the job's user."""
    files = manifest.meta["files"]
    if not files:
        return
    async with WorkerClient(job.store_root, job.uid, job.gid) as worker:
        for line in await worker.call("roll_back", files=files, suffix=f"after-{manifest.checkpoint}"):
            await supervisor.print(line)


async def give_up(job: ProtectedJob, supervisor: Supervisor, reason: str) -> None:
    """No checkpoint could be restored: hold the job, or start it from scratch, as configured; never silently."""
    if job.context.config.agent.on_restore_failure == "scratch":
        await job.start_fresh(supervisor, f"not restored ({reason}); the job starts from its beginning")
        return
    message = f"not restored: {reason}. The job is held with its checkpoints kept; release it with "
    message += f"`scontrol release {job.job}` when the cause is gone"
    try:
        await slurm.requeue_hold(job.job)
    except GpucrError as error:
        message += f" (it could not be held: {error})"
    await supervisor.refuse(message, HELD_EXIT_CODE)
