"""One node's part in a restore: capsule and image first, then the tree, then the open network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucr_hpc.agent import batchscript, tasks
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.steps import Steps, environment_of
from gpucr_hpc.capsule import cgroup, network
from gpucr_hpc.capsule.capsule import Builder, Identity, build, discard
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import descendants, namespace_processes
from gpucr_hpc.engine import hugepages, stream
from gpucr_hpc.engine import restore as engine
from gpucr_hpc.engine.cuda.node import NodeGpus
from gpucr_hpc.engine.openfiles import FilesPolicy
from gpucr_hpc.engine.worker_client import WorkerClient, pipe
from gpucr_hpc.errors import CoordinationError, GpucrError, PermissionRefused, RestoreFailed, RunOver
from gpucr_hpc.faults import Point, reach
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.log import Log
from gpucr_hpc.model import Manifest

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

STEPS_STREAM = "steps.json"
_SUPERVISORS_LIMIT_S = 120.0


class NodeRestore:
    """Build, run, open; or undo. The job's geometry, identity and run are set before.

    The checkpoint may be another job's, of the same user. ran_on: the job wrote on after this checkpoint, also to its
    output. outputs: the output files of this job as they were before another's checkpoint came. After `build`, `report`
    has a line for each file that was rolled back; after `open` also for each GPU that was not seen at work.
    After `run`, `fill_s` has the seconds of it in which memory was filled beside CRIU.
    """

    def __init__(
        self,
        job: ProtectedJob,
        manifest: Manifest,
        *,
        ran_on: bool = False,
        outputs: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._job, self._manifest, self._ran_on, self._outputs = job, manifest, ran_on, list(outputs)
        self._worker: WorkerClient | None = None
        self._builder: Builder | None = None
        self._meta: dict[str, Any] = manifest.rank(job.node_rank)
        self._gpus = NodeGpus(job.job, job.context.config.cuda)
        self._over = False
        self._tails: list[list[Any]] = []
        self.report: list[str] = []
        self.fill_s = 0.0

    async def build(self) -> None:
        """Check host and image, roll files back, make the capsule; its network is locked."""
        job, context, manifest = self._job, self._job.context, self._manifest
        assert context.criu is not None
        assert isinstance(job.geometry, Geometry)
        if manifest.uid != job.uid:
            raise PermissionRefused(who=f"uid {job.uid}", action=f"restore {manifest.checkpoint} of uid {manifest.uid}")
        engine.check_host(self._meta, context.criu)
        job.run_dir.make(job.uid, job.gid)
        files, user = self._files(), WorkerClient(job.store_root, job.uid, job.gid)
        try:
            # Other or too few cards are refused before the capsule is made. All wait for a process to start.
            starts = [self._map_gpus(), self._open_image(), *([user.start()] if files else [])]
            for failed in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(failed, BaseException):
                    raise failed
            if files:
                await self._fit_files(user, files)
        finally:
            await user.close()
        # No supervisor belongs to them before their sruns are started again.
        job.steps.adopt({"on_node": [step | {"launch": "none yet"} for step in self._meta["steps"]]})
        job.forget_failure()
        job.tasks = {t["key"] for t in self._meta["tasks"]}
        job.expected = job.tasks - {"batch"}
        job.set_phase(Phase.RESTORING)
        await reach(Point.CHECKED, job.job)
        covers, binds = await self._old_paths()
        self._builder = await build(
            job.job,
            job.run_dir,
            Identity(job.uid, job.gid, job.groups),
            geometry=job.geometry,
            node_rank=job.node_rank,
            config=context.config.network,
            pids=engine.pids(self._meta),
            covers=covers,
            binds=binds,
        )
        job.capsule = self._builder.capsule
        job.save()
        await reach(Point.BUILT, job.job)

    async def _open_image(self) -> None:
        """Start the worker that reads the image, and have it check what needs no chunk."""
        job, manifest = self._job, self._manifest
        self._worker = job.worker()
        await self._worker.start(job.run_dir.images, stream.SERVE_SOCKET)
        await self._worker.call(
            "serve",
            job=manifest.job,
            checkpoint=manifest.checkpoint,
            entry=manifest.image(job.node_rank).as_dict(),
            key=DataKey.unwrap(manifest.slots, job.context.site_keys, manifest.checkpoint).reveal_hex(),
            holder=engine.in_image(self._meta),
            sizes={file["path"]: file["size_bytes"] for file in self._meta["files"] if file.get("shared")},
            huge_pages=bool(self._meta.get("gpu")) and hugepages.wanted(),
        )

    async def _old_paths(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Directories to cover and files to bind, so that a tree that was started as another job finds its paths."""
        job, run_dir = self._job, self._job.run_dir
        job.paths_of = str(self._manifest.meta.get("paths_of", self._manifest.job))
        if job.paths_of == job.job:
            return [], []
        jobs = run_dir.path.parent
        covers, binds = [str(jobs)], [(str(run_dir.path),) * 2, (run_dir.user, str(jobs / job.paths_of / "user"))]
        if "script" in self._meta:
            job.script = self._meta["script"]["path"]
            run_dir.script.write_bytes(await self._extract(batchscript.SCRIPT_STREAM))
            os.chown(run_dir.script, job.uid, job.gid)
            run_dir.script.chmod(self._meta["script"]["mode"])
            covers.append(str(Path(job.script).parent.parent))
            binds.append((str(run_dir.script), job.script))
        return covers, binds

    async def _map_gpus(self) -> dict[str, str]:
        """From the cards that the job saw to those that it has now."""
        if not self._meta.get("gpu"):
            return {}
        supervisor = next(iter(self._job.supervisors.values()), None)
        env = environment_of(supervisor.pid) if supervisor is not None else {}
        return await self._gpus.expect(self._meta["gpu"], env)

    def _files(self) -> list[dict[str, Any]]:
        """Files that may have been written to after the checkpoint. The output of the job is among them only when it
        ran on: what Slurm and gpucr said when it left stays."""
        job, policy = self._job, self._job.policy.files
        files = list(self._meta["files"])
        if self._manifest.job != job.job and policy is not FilesPolicy.KEEP:
            files += self._outputs
        elif self._ran_on and policy is not FilesPolicy.KEEP:
            files += self._meta.get("outputs", [])
        return files

    async def _fit_files(self, worker: WorkerClient, files: list[dict[str, Any]]) -> None:
        """Give files the size that they had at the checkpoint, as the job's user; CRIU wants that.

        Their tails stay beside, or, by the job's policy, are put back before the tree runs. worker: it is the user's.
        """
        policy = self._job.policy.files
        grown = await worker.call("grown", files=files) if policy is FilesPolicy.REFUSE else []
        if grown:
            raise RestoreFailed(reason=f"--checkpoint-files=refuse: {grown[0]}", log="none")
        changed = await worker.call("set_aside", files=files, suffix=f"after-{self._manifest.checkpoint}")
        if policy is FilesPolicy.KEEP:
            self._tails = changed
            return
        self.report = [
            f"{path}: {size} bytes written after the checkpoint moved to {aside}" for path, aside, size in changed
        ]

    async def _put_back(self) -> None:
        """The tails of files that keep what was written after the checkpoint; the tree stands still."""
        if self._tails:
            async with WorkerClient(self._job.store_root, self._job.uid, self._job.gid) as worker:
                await worker.call("put_back", tails=self._tails)
            self._tails = []

    @property
    def worker(self) -> WorkerClient:
        """The worker that has the image; after `build`."""
        assert self._worker is not None
        return self._worker

    async def saved_steps(self) -> list[dict[str, Any]]:
        """The steps that were under way, from the image of the first node; not in the manifest, since they hold
        the user's environment and the manifest is not encrypted."""
        steps: list[dict[str, Any]] = json.loads(await self._extract(STEPS_STREAM))
        return steps

    async def _extract(self, name: str) -> bytes:
        """A small stream of the image."""
        assert self._worker is not None
        read, write = pipe()
        loop = asyncio.get_running_loop()
        with open(read, "rb") as file:
            content = loop.run_in_executor(None, file.read)
            with open(write, "wb"):
                await self._worker.call("extract", [write], name=name)
            return await content

    async def run(self) -> None:
        """Wait for the supervisors of the tasks that come back, then bring them back; the network stays locked."""
        job = self._job
        assert self._builder is not None
        assert self._worker is not None
        try:
            await asyncio.wait_for(job.all_expected(), _SUPERVISORS_LIMIT_S)
        except TimeoutError:
            missing = ", ".join(sorted(job.expected - set(job.supervisors)))
            raise CoordinationError(
                job=job.job, reason=f"on {job.context.node} the steps did not start again: {missing}"
            ) from None
        if not self._builder.capsule.alive():
            raise CoordinationError(job=job.job, reason=f"on {job.context.node} it died before its tree was back")
        steps = [s for key, s in sorted(job.supervisors.items()) if key != "batch"]
        first = job.supervisors.get("batch") or (steps[0] if steps else None)
        if first is not None:
            self._builder.place(first.pid)
        started = time.monotonic()
        gpus = await self._map_gpus()
        if gpus:
            job.run_dir.save_gpus(gpus)
        warm = asyncio.ensure_future(self._gpus.warm_spare())
        restored = await engine.restore(
            self._builder,
            job.run_dir,
            self._worker,
            self._meta,
            job.context.config.engine,
            before_it_runs=self._put_back if self._tails else None,
        )
        job.capsule, self.fill_s = restored.capsule, restored.fill_s
        job.save()
        await reach(Point.RESTORED, job.job)
        for task in self._meta["tasks"]:
            supervisor = job.supervisors.get(task["key"])
            if supervisor is not None and supervisor is not first:
                await job.place(supervisor, task["pid"], whole_tree=True)
        if "batch" not in job.supervisors:
            self._keep_from_step()
        log.info("tree restored", job=job.job, took_s=time.monotonic() - started, fill_s=self.fill_s)
        await warm
        if self._meta.get("gpu"):
            self._gpus.came_back(self._meta["gpu"], namespace_processes(job.capsule.init_pid))
            await self._gpus.restore(gpus)
            await reach(Point.GPUS_RESTORED, job.job)

    def _keep_from_step(self) -> None:
        """Memory of the tree was charged to the first step; its end must not take the capsule along, so what is no
        task of a step goes to the agent's own control groups."""
        assert self._job.capsule is not None
        processes = namespace_processes(self._job.capsule.init_pid)
        tasks = {t["pid"] for t in self._meta["tasks"]}
        roots = [p for p in processes if p.nspid in tasks]
        kept = {p.pid for root in roots for p in (root, *descendants(processes, root.pid))}
        for process in processes:
            if process.pid not in kept:
                with contextlib.suppress(GpucrError, OSError):
                    cgroup.place(process.pid, like=os.getpid())

    async def open(self, message: str) -> None:
        """Every node has its tree back: packets pass, supervisors relay."""
        job = self._job
        if self._over:  # what is there now belongs to another attempt
            raise RunOver(job=job.job, run=job.run)
        if job.capsule is None or not job.capsule.alive():
            # Not refused by CRIU: with a supervisor of a step that was killed, its processes were.
            raise CoordinationError(job=job.job, reason=f"on {job.context.node} it died after its tree had come back")
        await network.unlock(job.job)
        await reach(Point.UNLOCKED, job.job)
        await self._gpus.go()
        if self._meta.get("gpu"):
            job.run_dir.save_gpus({})  # they have the new cards now
        job.set_phase(Phase.RUNNING)
        for supervisor in list(job.supervisors.values()):
            await tasks.take_up(job, supervisor, message if supervisor.key == "batch" else "", restored=True)
        await job.steps.connect()
        self.report += await self._gpus.probe()
        await self.close()

    async def undo(self) -> None:
        """Remove what was made; must not raise. Once only: what is there later belongs to another attempt."""
        if self._over:
            return
        self._over = True
        try:
            await self._put_back()
        except (GpucrError, OSError) as error:
            log.error("tails are left beside their files", job=self._job.job, error=str(error))
        await self.close()
        job = self._job
        job.steps.stop()
        await job.dismiss_steps()
        capsule = self._builder.capsule if self._builder is not None else None
        try:
            await discard(job.job, job.run_dir, capsule)
        except Exception as error:
            log.error("remains of a restore", job=job.job, error=repr(error))
        job.capsule, job.phase, job.tasks, job.steps = None, Phase.NEW, set(), Steps(job)

    async def close(self) -> None:
        """End the worker."""
        await self._gpus.close()
        if self._worker is not None:
            await self._worker.close()
            self._worker = None
