"""`gpucr agent`: start, sockets, and the way of each connection to its job."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpucr_hpc import log as logging
from gpucr_hpc import slurm, wire
from gpucr_hpc.agent import journal, metrics, peers, supervision
from gpucr_hpc.agent.clock import Clock
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.control import Control
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.orders import Orders, PeerSession
from gpucr_hpc.agent.peers import Connector
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.agent.supervisor import Supervisor
from gpucr_hpc.capsule import cgroup, network
from gpucr_hpc.capsule.capsule import discard
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import Config, load
from gpucr_hpc.engine import criu, stream
from gpucr_hpc.errors import CriuError, GpucrError, HostError, JobUnknown
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_keys, load_trusted
from gpucr_hpc.log import Log
from gpucr_hpc.model import check_job_id

log = Log(__name__)

_HELLO_LIMIT_S = 10.0
_SWEEP_INTERVAL_S = 30.0
_ALONE_LIMIT_S = 5.0


class Agent:
    """All protected jobs of this node."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.jobs: dict[str, ProtectedJob] = {}

    async def adopt(self) -> None:
        """Find the capsules of an earlier agent again, and remove what is left of dead ones."""
        unknown = set()
        for run_dir in RunDir.all(self.context.config.agent.run_dir):
            state = run_dir.load()
            job = ProtectedJob(self.context, run_dir.job)
            try:
                if state is None:
                    await discard(run_dir.job, run_dir, None)
                elif await journal.adopt(job, state):
                    self.jobs[job.job] = job
            except Exception as error:  # it may run: others' jobs must not wait for it, and it keeps its network
                log.error("job not adopted", job=run_dir.job, error=repr(error))
                unknown.add(run_dir.job)
        for name in network.existing() - unknown:
            if name not in self.jobs:
                try:
                    await network.remove(name)
                except GpucrError as error:
                    log.error("network of a dead job not removed", job=name, error=str(error))

    async def sweep(self) -> None:
        """For ever: end the capsules of jobs that are led elsewhere and, by Slurm's word, are not here any more.

        Their lead tells it as a rule; this is for a lead that died with its node.
        """
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            for name, job in list(self.jobs.items()):
                if job.node_rank == 0 or job.phase is not Phase.RUNNING:
                    continue
                try:
                    info = await slurm.job(name)
                    left = not info.running or info.restarts > job.run
                except JobUnknown:
                    left = True
                except GpucrError:
                    continue
                if left and job.phase is Phase.RUNNING:
                    log.info("job is over, its lead did not say so", job=name)
                    job.spawn(slurm.forgive(name, job.excluded, job.run + 1))  # the lead's node may be lost
                    try:
                        await job.discard()
                    except (GpucrError, OSError) as error:
                        log.error("remains of a job", job=name, error=str(error))
                    if job.forgettable and self.jobs.get(name) is job:
                        del self.jobs[name]

    async def supervisor(self, channel: wire.Channel) -> None:
        """Serve one connection on the agent's socket until it ends."""
        with contextlib.suppress(TimeoutError):
            hello = await asyncio.wait_for(channel.receive(), _HELLO_LIMIT_S)
            if hello is not None and hello.type is wire.Type.HELLO:
                await self._serve(channel, hello)

    async def _serve(self, channel: wire.Channel, hello: wire.Frame) -> None:
        key = hello.get("STEP", "batch")
        supervisor = Supervisor(channel, hello, key if key == "batch" else f"{key}.{hello.get('RANK')}")
        try:
            name = check_job_id(hello.get("JOB"))
            found = cgroup.slurm_job(supervisor.pid)
            if not found:
                raise HostError(reason=f"pid {supervisor.pid} is not in a control group of a Slurm step")
            if found.isdecimal() and found != name:
                raise HostError(reason=f"pid {supervisor.pid} is of job {found}, not of job {name}")
        except (GpucrError, OSError) as error:
            log.warning("supervisor refused", pid=supervisor.pid, uid=supervisor.uid, error=str(error))
            await supervisor.run_unprotected(f"this job runs without protection: {error}")
            return
        job = self.jobs.setdefault(name, ProtectedJob(self.context, name))
        if not job.idle and job.uid != supervisor.uid:
            log.warning("foreign supervisor refused", job=name, uid=supervisor.uid)
            return
        job.connections += 1
        try:
            await supervision.hello(job, supervisor)
            while (frame := await channel.receive()) is not None and job.uid == supervisor.uid:
                await supervision.frame(job, supervisor, frame)
        finally:
            job.connections -= 1
            await asyncio.shield(supervision.gone(job, supervisor))
            for key in [k for k, j in self.jobs.items() if j.forgettable]:
                del self.jobs[key]


async def listen(path: Path, handler: wire.Handler) -> asyncio.Server:
    """A Unix socket that everybody may connect to; who it is, the kernel says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    quiet, limit = wire.ends_quietly(handler), wire.MAX_PAYLOAD_BYTES
    server = await asyncio.start_unix_server(quiet, str(path), backlog=512, limit=limit)
    path.chmod(0o666)
    return server


def guarded(serve: Callable[[wire.Channel], Awaitable[None]]) -> wire.Handler:
    """What happens to one connection is written down and harms no other."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(wire.Channel(reader, writer))
        except GpucrError as error:
            log.warning("connection refused", error=str(error))
        except Exception:
            log.exception("connection failed")
        finally:
            writer.close()

    return handler


def node_name() -> str:
    """This node's name as Slurm has it: SLURMD_NODENAME, else the short host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


async def make_context(config: Config) -> Context:
    """Read keys and look at CRIU; a host without a usable CRIU still serves, and says why it protects nothing."""
    problem: CriuError | None = None
    info = None
    try:
        info = await criu.inspect(config.engine)
    except CriuError as error:
        problem = error
        log.error("CRIU not usable", error=str(error))
    signing = load_signing_key(config.keys.signing)
    return Context(
        config=config,
        node=node_name(),
        site_keys=load_site_keys(config.keys.site, config.keys.others),
        signing_key=signing,
        trusted=load_trusted(config.keys.trusted, signing),
        criu=info,
        criu_problem=problem,
        connector=Connector(signing, config.network.agent_port),
    )


def operators(config: Config) -> set[int]:
    """Uids of the configured operators; unknown names are reported and left out."""
    found = set()
    for name in config.agent.operators:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            log.warning("agent.operators: no such account", name=name)
    return found


async def _alone(run_dir: Path) -> int:
    """A lock that ends with this process: a second agent would take over all jobs of the first, and its sockets."""
    lock = os.open(run_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _ALONE_LIMIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise HostError(reason=f"another agent is at work in {run_dir}") from None
        await asyncio.sleep(0.05)  # one that ends may still be on its way


async def serve(config: Config) -> None:
    """Run the agent until SIGTERM or SIGINT; capsules stay and are found again by the next one."""
    run_dir = Path(config.agent.run_dir)
    (run_dir / "jobs").mkdir(parents=True, exist_ok=True)
    run_dir.chmod(0o755)
    (run_dir / "jobs").chmod(0o711)
    lock = await _alone(run_dir)
    context = await make_context(config)
    await network.settle_host()
    try:
        stream.raise_pipe_limit(config.engine.pipe_limit_bytes)
    except OSError as error:  # it costs time only
        log.warning("fs.pipe-max-size cannot be raised", error=str(error))
    agent = Agent(context)
    await agent.adopt()
    orders = Orders(context, agent.jobs, operators(config))
    control = Control(context, agent.jobs, operators(config), orders)
    servers = [
        await listen(run_dir / "agent.sock", guarded(agent.supervisor)),
        await listen(run_dir / "control.sock", control.handle),
        await peers.serve(
            "0.0.0.0",  # noqa: S104 - peers prove themselves by the cluster's key
            config.network.agent_port,
            context.signing_key,
            lambda: PeerSession(context, agent.jobs, orders),
        ),
    ]
    if config.agent.metrics_port:
        try:
            text = functools.partial(metrics.METRICS.text, agent.jobs.values())
            servers.append(await metrics.serve(config.agent.metrics_port, text))
        except OSError as error:  # jobs are more than figures
            log.error("no figures for Prometheus", port=config.agent.metrics_port, error=str(error))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("agent ready", node=context.node, jobs=len(agent.jobs), criu=context.criu and context.criu.text)
    loops = [asyncio.ensure_future(work) for work in (agent.sweep(), Clock(agent.jobs).run())]
    await stop.wait()
    for task in loops:
        task.cancel()
    for server in servers:
        server.close()
    log.info("agent stops", jobs=len(agent.jobs))
    await end_tasks()
    os.close(lock)


async def end_tasks() -> None:
    """Cancel everything else that runs, also what is begun because something else was cancelled: a connection that
    ends lets a job look for its supervisor."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)


def collect_seldom() -> None:
    """Look for garbage in cycles less often than Python does by itself, every 700 objects: a checkpoint of a job of
    many nodes makes a hundred thousand, next to none of them in cycles."""
    gc.set_threshold(10_000, 20, 20)


def main() -> None:
    """Entry of `gpucr agent`."""
    collect_seldom()
    try:
        config = load()
        logging.setup(config.agent.log_level)
        asyncio.run(serve(config))
    except GpucrError as error:
        print(f"gpucr: error: {error}", file=sys.stderr)
        if error.advice():
            print(f"gpucr: hint: {error.advice()}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"gpucr: error: the agent cannot start: {error}", file=sys.stderr)
        raise SystemExit(HostError.exit_code) from None
