"""Build, find, restore into and end a capsule. gpucr-init does the privileged work; this talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpucr_hpc import wire
from gpucr_hpc.capsule import cgroup, network
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import namespace_processes, processes_with_network, read_process, start_time
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import NetworkConfig
from gpucr_hpc.errors import CapsuleError, RestoreFailed
from gpucr_hpc.proc import clean_env, run_async

INIT_PROGRAM = "/usr/lib/gpucr/gpucr-init"
SRUN_PROXY = "/usr/lib/gpucr/gpucr-srun"
PRIVATE_DIRECTORIES = ("/tmp", "/dev/shm")  # noqa: S108 - inside the capsule these are its own tmpfs
_BUILD_LIMIT_S = 20.0
_KILL_LIMIT_S = 30.0


@dataclass(frozen=True)
class Capsule:
    """A capsule that exists. init_pid, init_start: PID 1 on the host and its start time in clock ticks.
    root: pid of the holder inside the namespace, root of the dump. groups: the user's supplementary ones."""

    job: str
    node_rank: int
    uid: int
    gid: int
    init_pid: int
    init_start: int
    root: int
    groups: tuple[int, ...] = ()

    def alive(self) -> bool:
        """Whether PID 1 still runs; start times guard against a reused pid."""
        process = read_process(self.init_pid)
        return process is not None and process.state not in "ZX" and start_time(self.init_pid) == self.init_start

    def inside(self, path: str) -> Path:
        """A path of the capsule's mount namespace, seen from the host."""
        return Path(f"/proc/{self.init_pid}/root") / path.lstrip("/")

    def shepherd(self) -> int | None:
        """Pid of the shepherd inside the namespace."""
        return next((p.nspid for p in namespace_processes(self.init_pid) if p.name == "gpucr-shepherd"), None)

    async def kill(self) -> None:
        """End every process of the capsule (the kernel does it when PID 1 dies) and wait until they are gone."""
        if not self.alive():
            return
        try:
            descriptor = os.pidfd_open(self.init_pid)
        except ProcessLookupError:  # it ended by itself in between
            return
        try:
            if start_time(self.init_pid) == self.init_start:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            loop, gone = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await asyncio.wait_for(gone.wait(), _KILL_LIMIT_S)
            except TimeoutError:
                raise CapsuleError(job=self.job, node="this node", reason="its init does not die") from None
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Identity:
    """Whose a capsule is. groups: supplementary groups that Slurm gave the job's processes."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, supervisor_pid: int, uid: int, gid: int) -> Identity:
        """Read the supplementary groups from a supervisor's own process."""
        for line in Path(f"/proc/{supervisor_pid}/status").read_text().splitlines():
            if line.startswith("Groups:"):
                return cls(uid, gid, tuple(int(g) for g in line.split()[1:]))
        return cls(uid, gid, ())


@dataclass(frozen=True)
class RestorePids:
    """Numbers in the pid namespace of a capsule that is restored. holder: of the new holder, 0: any above `above`;
    old_holder: of the dumped one when it comes back; above: all others that are not of the image are above it."""

    holder: int
    old_holder: int
    above: int


class Builder:
    """A capsule under construction in restore mode: its holder waits for the order to run CRIU."""

    def __init__(self, capsule: Capsule, control: wire.Channel) -> None:
        self.capsule, self._control = capsule, control

    def place(self, like: int) -> None:
        """Put the capsule's own processes, and so all that they start or restore, where a supervisor is."""
        for process in namespace_processes(self.capsule.init_pid):
            cgroup.place(process.pid, like=like)
            cgroup.bind(process.pid, like=like)

    async def restore(
        self, argv: Sequence[str], env: Mapping[str, str], *, old_root: int, shepherd: int, log: Path
    ) -> Capsule:
        """Have the holder run CRIU as its own child and take the restored tree over.

        Returns the capsule with its new root. Raises RestoreFailed with CRIU's last words.
        """
        await self._control.send(
            wire.make(
                wire.Type.RESTORE,
                ("ARG", argv),
                ("ENV", wire.env_pairs(env)),
                OLD=old_root,
                SHEPHERD=shepherd,
            )
        )
        result = await self._control.receive()
        if result is None or result.type is not wire.Type.RESULT:
            raise RestoreFailed(reason="the capsule's holder died while CRIU ran", log=log)
        if result.int("STATUS") != 0:
            raise RestoreFailed(reason=result.get("MSG").strip() or f"CRIU: status {result.get('STATUS')}", log=log)
        adopted = await self._control.receive()
        if adopted is None or adopted.type is not wire.Type.ADOPTED:
            why = adopted.get("MSG") if adopted else "it died"
            raise RestoreFailed(reason=f"the holder could not take the restored tree over: {why}", log=log)
        self._control.close()
        return replace(self.capsule, root=adopted.int("ROOT"))


def _binds() -> list[tuple[str, str]]:
    """Files that a capsule sees in place of the node's: srun is our proxy, name servers are reachable ones."""
    binds = []
    srun = shutil.which("srun", path=clean_env()["PATH"])
    if srun is not None:
        binds.append((SRUN_PROXY, os.path.realpath(srun)))
    resolver = network.resolver_file()
    if resolver not in (None, "/etc/resolv.conf"):
        binds.append((str(resolver), "/etc/resolv.conf"))
    return binds


async def build(
    job: str,
    run_dir: RunDir,
    who: Identity,
    *,
    geometry: Geometry,
    node_rank: int,
    config: NetworkConfig,
    pids: RestorePids | None = None,
    hide_io_uring: bool = False,
    covers: Sequence[str] = (),
    binds: Sequence[tuple[str, str]] = (),
) -> Builder:
    """Make network and namespaces for a job.

    run_dir exists (RunDir.make). pids: None starts a shepherd; else a restore is prepared. hide_io_uring: what is
    started finds none in the kernel; what is restored has that from its start. covers, binds: directories
    that are hidden but for what is bound there, and more (source, target) to bind.
    On any failure everything made is removed again and CapsuleError says which step failed.
    """
    hostname = geometry.names[node_rank]
    restoring = pids is not None
    run_dir.hosts.write_text(network.hosts_text(config, geometry))
    await network.create(job, node_rank, geometry, config, locked=restoring)
    ours, theirs = socket.socketpair()
    netns = os.open(network.namespace_path(job), os.O_RDONLY | os.O_CLOEXEC)
    argv = [
        *(INIT_PROGRAM, "capsule", "--mode", "restore" if restoring else "start"),
        *("--uid", str(who.uid), "--gid", str(who.gid)),
        *("--groups", ",".join(map(str, who.groups)) or str(who.gid)),
        *("--hostname", hostname, "--run-dir", str(run_dir.path), "--hosts", str(run_dir.hosts)),
        *("--netns", str(netns), "--control", str(theirs.fileno())),
        *("--last-pid", str(pids.above if pids else 0), "--holder-pid", str(pids.holder if pids else 0)),
        *("--tmpfs-size", "0"),
    ]
    if hide_io_uring and not restoring:
        argv.append("--hide-io-uring")
    for directory in PRIVATE_DIRECTORIES:
        argv += ["--private", directory]
    for directory in covers:
        argv += ["--cover", directory]
    for source, target in (*_binds(), *binds):
        argv += ["--bind", f"{source}:{target}"]
    capsule = None
    try:
        starter = await run_async(argv, timeout_s=_BUILD_LIMIT_S, env=clean_env(), pass_fds=(netns, theirs.fileno()))
        theirs.close()
        ours.setblocking(False)
        control = await wire.channel_from(ours)
        ready = await asyncio.wait_for(control.receive(), _BUILD_LIMIT_S)
        if starter.status != 0 or ready is None or ready.type is not wire.Type.READY:
            why = ready.get("MSG") if ready else (starter.stderr.strip() or f"status {starter.status}")
            raise CapsuleError(job=job, node=hostname, reason=f"not built: {why}")
        init_pid = ready.int("PID")
        capsule = Capsule(
            job, node_rank, who.uid, who.gid, init_pid, start_time(init_pid) or 0, ready.int("ROOT"), who.groups
        )
    except TimeoutError:
        await discard(job, run_dir, capsule)
        raise CapsuleError(job=job, node=hostname, reason=f"not ready within {_BUILD_LIMIT_S} s") from None
    except BaseException:
        await discard(job, run_dir, capsule)
        raise
    finally:
        theirs.close()
        os.close(netns)
    return Builder(capsule, control)


async def _kill_network(job: str) -> None:
    """End what an agent that died while it built a capsule had started: all of it is in the job's network."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while pids := processes_with_network(network.namespace_path(job)):
        if time.monotonic() > deadline:
            raise CapsuleError(job=job, node="this node", reason=f"processes do not die: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


async def discard(job: str, run_dir: RunDir, capsule: Capsule | None) -> None:
    """Remove everything of a job from this node: processes, network, run directory."""
    if capsule is not None:
        await capsule.kill()
    else:
        await _kill_network(job)
    await network.remove(job)
    run_dir.remove()
