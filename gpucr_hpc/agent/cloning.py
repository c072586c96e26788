"""`sbatch --restore-from`: a new job goes on from a checkpoint of another job of the same user.

The tree keeps what it knows of itself: environment, node names, paths. Two of these have the old job's id, that of its
shepherd's socket and that of its batch script, and the new capsule shows its own there (NodeRestore). Everything
outside is the new job's: steps, control groups, output, checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import claims, restarting
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.claims import began_as, some, written
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.engine.openfiles import output_files
from gpucr_hpc.errors import CheckpointUnfit
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest, new_checkpoint_id

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)


async def restore(job: ProtectedJob, supervisor: Supervisor, info: slurm.JobInfo) -> None:
    """Bring the wanted checkpoint back as this job: at its first run, and in later ones as long as it has no checkpoint
    of its own. Raises what speaks against it; nothing is running then."""
    wanted = job.policy.restore_from
    async with job.worker() as worker:
        catalog = Catalog(job.context, worker, job.store_root)
        manifest = await catalog.find(wanted, job.uid)
        check(manifest, info)
        outputs: list[dict[str, Any]] = []
        if job.run == 0:
            await claims.claim(catalog, job.job, manifest)
            job.excluded = info.excluded_nodes
            now = [file.as_dict() for file in output_files([supervisor.pid])]
            await catalog.first_run(job.job, new_checkpoint_id(), job.excluded, outputs=now)
        else:
            outputs = await catalog.first_outputs(job.job)
    first = began_as(manifest)
    lines = [f"what goes on began as job {first}: SLURM_JOB_ID stays {first}, and the script submitted now is not run"]
    files = written(manifest)
    if files:
        lines.append(f"from now on this job writes to {some(files)} of job {manifest.job}")
    await restarting.persist(job, supervisor, manifest, info, outputs=outputs, problems=lines)


def check(manifest: Manifest, info: slurm.JobInfo) -> None:
    """Raise CheckpointUnfit when a job of this shape cannot take a checkpoint."""
    shape = {"nodes": len(manifest.meta["ranks"]), **manifest.meta.get("shape", {})}
    have = {"nodes": info.node_count, "tasks": info.tasks, "cpus": info.cpus}
    for key, option in (("nodes", "nodes"), ("tasks", "ntasks")):
        if key in shape and shape[key] != have[key]:
            reason = f"it was made with {shape[key]} {key}, this job has {have[key]}: use --{option}={shape[key]}"
            raise CheckpointUnfit(reason=reason)
    if have["cpus"] < shape.get("cpus", 0):
        reason = f"it was made with {shape['cpus']} processors, this job has {have['cpus']}"
        raise CheckpointUnfit(reason=reason)
    if "script" not in manifest.rank(0):
        raise CheckpointUnfit(reason="the batch script is not in it")
