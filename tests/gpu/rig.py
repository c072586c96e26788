"""One node without Slurm: jobs in real capsules, checkpointed and restored by the agent's own code.

What is the product's: capsule, shepherd, preflight, participant, coordinator, CRIU, driver workers, store, manifest,
restore. What is not there: slurmctld, slurmd, supervisors. A stand-in for the batch supervisor takes the agent's words.
"""

from __future__ import annotations

import array
import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucr_hpc import slurm, wire
from gpucr_hpc.agent import checkpointing, nccl
from gpucr_hpc.agent.catalog import Catalog
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.daemon import make_context
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.noderestore import NodeRestore
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule.capsule import Identity, build
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.capsule.rundir import FILES_PLUGIN
from gpucr_hpc.config import AgentConfig, Config, CudaConfig, EngineConfig, KeysConfig, NetworkConfig, StoreConfig
from gpucr_hpc.engine import large
from gpucr_hpc.image import native
from gpucr_hpc.image.keyfiles import generate_keys
from gpucr_hpc.wire import Frame, Type, make

INTERPOSER = Path("/usr/lib/gpucr/libgpucr_nccl.so")
NODE = "gpu1"
USER = 65534


@dataclass
class Supervisor:
    """Stands for gpucr-task of the batch script; pid: a process whose environment says which cards Slurm gave."""

    pid: int
    key: str = "batch"
    said: list[str] = field(default_factory=list)
    hello: Frame = field(default_factory=lambda: make(Type.HELLO, JOB="1"))

    async def attach(self, socket: str, message: str, *, restored: bool) -> None:  # noqa: ARG002
        self.said.append(message)

    async def print(self, message: str) -> None:
        self.said.append(message)

    async def release(self, message: str) -> None:
        self.said.append(message)


class Rig:
    """Directories, keys, configuration; a process with a GPU environment for each stand-in."""

    def __init__(self, base: Path, *, criu: str, cuda: CudaConfig | None = None, store: Path | None = None) -> None:
        self.base, self.criu, self.cuda = base, criu, cuda or CudaConfig()
        self.store = store or base / "store"
        self.keys = base / "keys"
        self.helpers: list[subprocess.Popen[bytes]] = []
        if not self.keys.exists():
            base.mkdir(parents=True, exist_ok=True)
            base.chmod(0o755)
            generate_keys(self.keys)
        self.store.mkdir(parents=True, exist_ok=True)

    async def context(self) -> Context:
        config = Config(
            store=StoreConfig(root=str(self.store), user="root"),
            keys=KeysConfig(
                site=str(self.keys / "site.key"),
                others=str(self.keys / "site.d"),
                signing=str(self.keys / "signing.key"),
                trusted=str(self.keys / "trusted"),
            ),
            agent=AgentConfig(run_dir="/run/gpucr-rig", log_level="warning"),
            engine=EngineConfig(criu=self.criu, dump_timeout_s=900.0),
            network=NetworkConfig(nat=False),
            cuda=self.cuda,
        )
        return await make_context(config)

    def supervisor(self, env: Mapping[str, str]) -> Supervisor:
        helper = subprocess.Popen(["sleep", "3600"], env={"PATH": "/usr/bin:/bin", **env})
        self.helpers.append(helper)
        return Supervisor(helper.pid)

    def close(self) -> None:
        for helper in self.helpers:
            helper.kill()
            helper.wait()


class Job:
    """A job of one task. Its folder is its working directory and survives it."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number = rig, str(number)
        self.folder = rig.base / f"job{number}"
        self.folder.mkdir(exist_ok=True)
        os.chown(self.folder, USER, USER)
        self.job: ProtectedJob | None = None
        self.report: dict[str, Any] = {}
        self.gpu_s: dict[str, float] = {}

    @property
    def protected(self) -> ProtectedJob:
        assert self.job is not None
        return self.job

    @property
    def said(self) -> list[str]:
        """What the user would have read."""
        return self.protected.supervisors["batch"].said  # type: ignore[attr-defined]

    async def _new(self, env: Mapping[str, str]) -> ProtectedJob:
        job = ProtectedJob(await self.rig.context(), self.number)
        job.uid = job.gid = USER
        job.groups = (USER,)
        job.geometry = Geometry((NODE,), (NODE,), ("127.0.0.1",))
        job.supervisors["batch"] = self.rig.supervisor(env)  # type: ignore[assignment]
        self.job = job
        return job

    async def start(self, script: str, env: Mapping[str, str]) -> None:
        """Run a shell script as the job's only task."""
        job = await self._new(env)
        job.run_dir.make(job.uid, job.gid)
        assert job.geometry is not None
        who = Identity(job.uid, job.gid, job.groups)
        built = await build(
            job.job, job.run_dir, who, geometry=job.geometry, node_rank=0, config=job.context.config.network
        )
        job.capsule = built.capsule
        job.phase = Phase.RUNNING
        job.tasks = {"batch"}
        path = self.folder / "job.sh"
        path.write_text(script)
        await asyncio.to_thread(self._spawn, ["/bin/bash", str(path)], dict(env))

    def _spawn(self, argv: Sequence[str], env: dict[str, str]) -> None:
        """As a supervisor does: SPAWN with stdio, wait for SPAWNED, GO."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(self.protected.run_dir.shepherd_socket)
        env = {**env, "USE_LIBUV": "0", "HOME": str(self.folder)}
        frame = make(
            Type.SPAWN, ("ARG", argv), ("ENV", wire.env_pairs(env)), TASK="batch", RANK=0, CWD=self.folder, UMASK="022"
        )
        null = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
        data = wire.encode(frame)
        sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", null))])
        sock.sendall(data[sent:])
        for fd in null:
            os.close(fd)
        header = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        kind, length = wire.parse_header(header)
        answer = wire.parse_payload(kind, sock.recv(length, socket.MSG_WAITALL))
        if kind is not Type.SPAWNED:
            raise RuntimeError(f"not spawned: {answer}")
        sock.sendall(wire.encode(make(Type.GO, TASK="batch")))
        time.sleep(0.1)
        sock.close()

    async def checkpoint(self, *, leave: bool, limit_s: float = 600.0) -> dict[str, Any]:
        """Through the coordinator, with tries when the cut is not possible; with leave the job is gone afterwards."""
        job = self.protected
        info = _requeued(job.job) if leave else None
        checkpointing._REQUEUED_BUDGET_S = limit_s  # Slurm's kill time is not what is tested here
        start = time.monotonic()
        report = await checkpointing.checkpoint(job, "acceptance", leave=leave, info=info)
        self.report = {**report, "wall_s": round(time.monotonic() - start, 3)}
        self.gpu_s = await self._gpu_s()
        return self.report

    async def _gpu_s(self) -> dict[str, float]:
        """What the newest manifest says of the driver's part."""
        job = self.protected
        async with job.worker() as worker:
            candidates, _ = await Catalog(job.context, worker, job.store_root).candidates(job.job, job.uid)
        gpu = candidates[0].meta["ranks"][0]["gpu"] if candidates else None
        return dict(gpu["took_s"]) if gpu else {}

    async def restore(self, env: Mapping[str, str]) -> dict[str, float]:
        """From the newest checkpoint; seconds of each phase."""
        job = await self._new(env)
        job.run_dir.make(job.uid, job.gid)
        async with job.worker() as worker:
            catalog = Catalog(job.context, worker, job.store_root)
            candidates, problems = await catalog.candidates(job.job, job.uid)
        if not candidates:
            raise RuntimeError(f"nothing to restore: {problems}")
        job.run_dir.make(job.uid, job.gid)
        restore = NodeRestore(job, candidates[0])
        marks = {"start": time.monotonic()}
        try:
            for phase, work in (("build", restore.build), ("run", restore.run)):
                await work()
                marks[phase] = time.monotonic()
            gpu_s = restore._gpus.took_s.get("restore", 0.0)
            if candidates[0].meta.get("nccl"):
                job.run_dir.quiet.touch()
            await restore.open("restored")
            marks["open"] = time.monotonic()
            if candidates[0].meta.get("nccl"):  # as agent.restarting has it
                await nccl.bring_back(job)
                if any("NCCL" in text for text in self.said):
                    raise RuntimeError(f"the job was told: {self.said}")
            marks["nccl"] = time.monotonic()
        except BaseException:
            await restore.undo()
            raise
        times = list(marks.items())
        spans = {name: round(at - times[i][1], 3) for i, (name, at) in enumerate(times[1:])}
        total = round(marks["nccl"] - marks["start"], 3)
        spans |= {"fill": restore.fill_s, "gpu_restore": gpu_s}
        return {**spans, "total": total, "notes": restore.report}  # type: ignore[dict-item]

    async def end(self) -> None:
        """Kill the capsule, keep the store and the folder."""
        if self.job is not None:
            await self.job.discard()

    def pids(self, name: str = "python3") -> list[int]:
        """Processes of the capsule on the host, by name."""
        assert self.protected.capsule is not None
        return [p.pid for p in namespace_processes(self.protected.capsule.init_pid) if p.name.startswith(name)]

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, name: str = "train.log") -> list[str]:
        return self.text(name).splitlines()

    async def until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"job {self.number}: not within {limit_s} s: {what}: {self.text('err')[-1500:]}")
            await asyncio.sleep(0.05)

    async def advances(self, name: str = "train.log", by: int = 3, limit_s: float = 60.0) -> None:
        """The job runs: its log grows."""
        start = len(self.lines(name))
        await self.until(lambda: len(self.lines(name)) >= start + by, limit_s, f"{name} grows")


def _requeued(job: str) -> slurm.JobInfo:
    """What Slurm would say of a job that it has requeued itself, so that the agent need not."""
    return slurm.JobInfo(
        job=job,
        uid=USER,
        states=frozenset({"PENDING", "COMPLETING"}),
        nodes=NODE,
        node_count=1,
        batch_host=NODE,
        partition="",
        restarts=1,
        preempt_time=0,
        end_time=0,
        excluded_nodes="",
        required_nodes="",
        cpus=1,
        tasks=1,
        is_het=False,
        requeueable=True,
    )


def install(tools: Path) -> None:
    """Put the carried programs where the agent looks for them."""
    place = Path("/usr/lib/gpucr")
    place.mkdir(parents=True, exist_ok=True)
    for name, source in (("gpucr-init", "gpucr-init"), ("gpucr-hook", "gpucr-init"), ("gpucr-copier", "gpucr-copier")):
        _put(tools / "bin" / source, place / name)
    for library in (INTERPOSER, FILES_PLUGIN, large.PLUGIN, native.LIBRARY):
        if (tools / "lib" / library.name).exists():
            _put(tools / "lib" / library.name, library)
    link = Path("/usr/local/sbin/nft")
    if shutil.which("nft") is None and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tools / "bin" / "nft")


def _put(source: Path, target: Path) -> None:
    """A new file, by rename: this process may have the old one loaded."""
    fresh = target.with_name(f".{target.name}.new")
    shutil.copy(source, fresh)
    fresh.chmod(0o755)
    fresh.rename(target)
