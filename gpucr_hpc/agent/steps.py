"""Steps of a protected job: real sruns for the proxies in its capsules, and who runs where.

A proxy's request comes over the shepherd's CONTROL connection. The agent of the batch host runs the real srun outside
the capsule, as the user, in the batch supervisor's control groups, under `gpucr-init run`, which writes the result to
a file: so a step and its result outlive the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import secrets
import signal
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucr_hpc import wire
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.capsule import cgroup, network
from gpucr_hpc.capsule.capsule import INIT_PROGRAM
from gpucr_hpc.capsule.processes import start_time
from gpucr_hpc.errors import GpucrError, PeerLost, UsageError
from gpucr_hpc.log import Log
from gpucr_hpc.proc import find_program
from gpucr_hpc.slurm import srun_args

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_ANNOUNCE_LIMIT_S = 30.0  # for another node's agent to come back
_WATCH_INTERVAL_S = 0.2  # how often srun's own words are looked for; its end is noticed at once
_KEY = re.compile(r"[0-9a-f]{16}")
# Of the real srun, for the plugin and the supervisors: srun passes on what begins with SLURM_ whatever --export says.
LAUNCH_VARIABLE = "SLURM_GPUCR_LAUNCH"
_STEP_VARIABLE = "SLURM_GPUCR_STEP"
_CWD_VARIABLE = "SLURM_GPUCR_CWD"
_MOST_ENDED = 256
_FAILED = 1 << 8  # wait(2) status of exit code 1


@dataclass
class Step:
    """One srun of the job. key, port, token: from its proxy. argv, env, cwd, umask: as the user called srun.

    pid, start: of the real srun's wrapper, 0 when it does not run. supervised: False for --no-checkpoint.
    launch: names this start of the real srun; supervisors of an earlier one are sent away by it, and what an earlier
    one says and how it ends is not read for this one's: it may end when the job is on this node again.
    """

    key: str
    port: int
    token: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    rlimits: list[str] = field(default_factory=list)
    supervised: bool = True
    pid: int = 0
    start: int = 0
    launch: str = ""

    @property
    def run(self) -> str:
        """The name of this start of the real srun in the run directory."""
        return f"{self.key}.{self.launch}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class StepOnNode:
    """What the agent of each node knows of a step: where its tasks' stdio goes, and which have ended (rank to wait(2)
    status). tasks: number of the whole step, 0 when not known. launch: as in Step."""

    key: str
    stdio: str
    token: str
    tasks: int = 0
    launch: str = ""
    ended: dict[int, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back: it has no keys but text, and a manifest is compared with what was written."""
        return dataclasses.asdict(self) | {"ended": {str(rank): status for rank, status in self.ended.items()}}


class Steps:
    """The steps of one job on this node. Only the batch host's launches any."""

    def __init__(self, job: ProtectedJob) -> None:
        self._job = job
        self.steps: dict[str, Step] = {}
        self.on_node: dict[str, StepOnNode] = {}
        self.ended: dict[str, int] = {}  # the last ones, and their status: a word to the shepherd may be lost
        self._control: wire.Channel | None = None

    # --- the shepherd's connection ----------------------------------------------------------------------

    async def connect(self) -> None:
        """Open the CONTROL connection and serve it until the shepherd detaches."""
        try:
            channel = await wire.connect(self._job.run_dir.shepherd_socket)
        except OSError as error:
            log.error("shepherd not reached", job=self._job.job, error=str(error))
            return
        self._control = channel
        await channel.send(wire.make(wire.Type.CONTROL, ("KNOWN", self.steps)))
        for step in list(self.steps.values()):  # the word of its plan may have been lost
            await self._plan(step, self._args(step))
        self._job.spawn(self._serve(channel))

    async def _serve(self, channel: wire.Channel) -> None:
        while (frame := await channel.receive()) is not None:
            if frame.type is wire.Type.SRUN:
                self._job.spawn(self._request(frame))
            elif frame.type is wire.Type.SRUNSIGNAL:
                self.signal(frame.get("KEY"), frame.int("SIGNAL"))
        channel.close()
        if self._control is channel:
            self._control = None

    async def _tell(self, frame: wire.Frame) -> bool:
        if self._control is None:
            return False
        await self._control.send(frame)
        return True

    # --- requests ---------------------------------------------------------------------------------------

    async def _request(self, frame: wire.Frame) -> None:
        env = dict(pair.partition("=")[::2] for pair in frame.all("ENV"))
        step = Step(
            key=frame.get("KEY"),
            port=frame.int("PORT"),
            token=frame.get("TOKEN"),
            argv=frame.all("ARG"),
            env=env,
            cwd=frame.get("CWD"),
            umask=int(frame.get("UMASK", "022"), 8),
            rlimits=frame.all("RLIMIT"),
        )
        if step.key in self.ended:  # the shepherd let go before it heard of the end
            await self._tell(wire.make(wire.Type.SRUNEND, KEY=step.key, STATUS=self.ended[step.key]))
            return
        try:
            if not _KEY.fullmatch(step.key):
                raise UsageError(reason="bad step key")
            if self._job.node_rank != 0:
                raise UsageError(reason="a step can be started on the job's first node only")
            args = self._args(step)
            refusal = srun_args.refusal(args)
            if refusal is not None:
                raise UsageError(reason=refusal)
            step.supervised = not args.has("no-checkpoint")
            await self._plan(step, args)
            self.steps[step.key] = step
            await self.launch(step, self._first_command(args), {})
        except Exception as error:  # whatever it is: a srun that is told nothing waits for ever
            if not isinstance(error, GpucrError | OSError | ValueError):
                log.exception("unexpected")
            log.warning("step refused", job=self._job.job, step=step.key, error=str(error))
            self.steps.pop(step.key, None)
            text = str(error)
            said = text if text.startswith("srun:") else f"srun: error: gpucr: {text}"
            await self._tell(wire.make(wire.Type.OUTPUT, KEY=step.key, FD=2, DATA=said + "\n"))
            await self._tell(wire.make(wire.Type.SRUNEND, KEY=step.key, STATUS=_FAILED))

    def _args(self, step: Step) -> srun_args.SrunArgs:
        return srun_args.expanded(srun_args.with_environment(srun_args.parse(step.argv), step.env), step.env)

    async def _plan(self, step: Step, args: srun_args.SrunArgs) -> None:
        plan = srun_args.stdio_plan(args, args.value("chdir") or step.cwd)
        await self._tell(
            wire.make(
                wire.Type.PLAN,
                KEY=step.key,
                TASKS=srun_args.task_count(args, step.env) if step.supervised else 0,
                LABEL=int(plan.label),
                STDIN=plan.stdin,
                STDOUT=plan.stdout,
                STDERR=plan.stderr,
                APPEND=int(plan.append),
            )
        )

    def _first_command(self, args: srun_args.SrunArgs) -> srun_args.SrunArgs:
        assert self._job.geometry is not None
        return srun_args.real_command(args, self._job.geometry.physical)

    # --- real sruns -------------------------------------------------------------------------------------

    async def launch(
        self, step: Step, args: srun_args.SrunArgs, extra_env: dict[str, str], without: Iterable[str] = ()
    ) -> None:
        """Start the real srun of a step; variables named in `without` are kept from it."""
        job = self._job
        step.launch = secrets.token_hex(8)
        if step.supervised:
            assert job.geometry is not None
            stdio = f"{network.address(job.context.config.network, 0)}:{step.port}"
            await self._announce(step, stdio)
        batch = job.batch[0] or 0  # an agent that begins anew knows it before it says HELLO again
        env = srun_args.run_environment(step.env, environment_of(batch)) | extra_env
        for name in without:
            env.pop(name, None)
        if step.supervised:
            env |= {_STEP_VARIABLE: step.key, LAUNCH_VARIABLE: step.launch}
            if not args.has("chdir"):
                env[_CWD_VARIABLE] = step.cwd  # out here there may be no such directory, or another one
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        out, err = (os.open(path, flags, 0o600) for path in self._words(step).values())
        cwd = step.cwd if os.path.isdir(step.cwd) else "/"
        try:
            process = await asyncio.create_subprocess_exec(
                *(INIT_PROGRAM, "run", "--status", str(job.run_dir.step_status(step.run)), "--"),
                *(*limits_argv(step.rlimits), find_program("srun"), *args.argv()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                cwd=cwd,
                umask=step.umask,
                user=job.uid,
                group=job.gid,
                extra_groups=job.groups,
                start_new_session=True,
            )
        finally:
            os.close(out)
            os.close(err)
        step.pid, step.start = process.pid, start_time(process.pid) or 0
        with contextlib.suppress(OSError, GpucrError):
            cgroup.place(process.pid, like=batch)
        job.save()
        log.info("step starts", job=job.job, step=step.key, argv=" ".join(args.argv())[:200])
        job.spawn(self.watch(step))

    async def _announce(self, step: Step, stdio: str) -> None:
        """Tell every node of a step; another node's agent may just be restarting."""
        deadline = time.monotonic() + _ANNOUNCE_LIMIT_S
        while True:
            try:
                await self._job.on_all("step", key=step.key, stdio=stdio, token=step.token, launch=step.launch)
                return
            except PeerLost:
                if self._job.phase is not Phase.RUNNING or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def watch(self, step: Step) -> None:
        """Pass on what a real srun says, and its end. Works for one that an earlier agent started, too."""
        words, result = self._words(step), self._job.run_dir.step_status(step.run)
        shown = dict.fromkeys(words, 0)
        while True:
            ended = start_time(step.pid) != step.start or result.exists()
            for number, path in words.items():
                try:
                    with path.open("rb") as file:
                        file.seek(shown[number])
                        text = file.read()
                except OSError:
                    return  # the job has left this node
                said = text.replace(b"\0", b"").decode(errors="replace")
                frame = wire.make(wire.Type.OUTPUT, KEY=step.key, FD=number, DATA=said)
                if text and await self._tell(frame):
                    shown[number] += len(text)
            if ended:
                break
            await asyncio.sleep(_WATCH_INTERVAL_S)
        if self._given_up(step):
            return
        if self._job.phase is Phase.RESTORING:
            await self._job.step_failed(f"srun of step {step.key} ended: {_shown(words[2])}")
            return
        if self._job.leaving:
            return  # ended because the job leaves: after the move the step goes on
        await self._end(step, _read_status(result))

    def _words(self, step: Step) -> dict[int, Path]:
        """Files of what the real srun itself says, by descriptor."""
        return {1: self._job.run_dir.steps / f"{step.run}.out", 2: self._job.run_dir.steps / f"{step.run}.err"}

    def _given_up(self, step: Step) -> bool:
        """Whether a srun is of a restore that was given up, or of an earlier run of the job."""
        return self._job.steps is not self or self.steps.get(step.key) is not step

    async def _end(self, step: Step, status: int) -> None:
        told = wire.make(wire.Type.SRUNEND, KEY=step.key, STATUS=status)
        if not self._given_up(step):
            self.ended[step.key] = status
            while len(self.ended) > _MOST_ENDED:
                del self.ended[next(iter(self.ended))]
        while self._given_up(step) or not await self._tell(told):
            if self._job.leaving or self._given_up(step):
                return
            await asyncio.sleep(_WATCH_INTERVAL_S)  # a checkpoint is under way; the shepherd comes back after it
        self.steps.pop(step.key, None)
        log.info("step ended", job=self._job.job, step=step.key, status=status)
        for path in self._words(step).values():
            path.unlink(missing_ok=True)
        self._job.run_dir.step_status(step.run).unlink(missing_ok=True)
        with contextlib.suppress(GpucrError):
            await self._job.on_all("step_end", key=step.key)
        self._job.save()

    def signal(self, key: str, number: int) -> None:
        """Send a signal to the real srun of a step, through its wrapper."""
        step = self.steps.get(key)
        if step is not None and step.pid and start_time(step.pid) == step.start:
            with contextlib.suppress(ProcessLookupError):
                # KILL would leave srun behind: its wrapper cannot pass that on, its group can.
                if number == signal.SIGKILL:
                    os.killpg(step.pid, signal.SIGTERM)
                else:
                    os.kill(step.pid, number)

    def stop(self) -> None:
        """End the real sruns: the restore for which they were started is given up."""
        for step in self.steps.values():
            if step.pid and start_time(step.pid) == step.start:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(step.pid, signal.SIGTERM)
        self.steps = {}

    # --- moves ------------------------------------------------------------------------------------------

    async def relaunch(self, saved: Iterable[dict[str, Any]], ranks: dict[str, dict[int, int]]) -> None:
        """Start the sruns of saved steps again, each task where its process will be. ranks: step key to task rank
        to node rank; a step that had no task yet starts as if for the first time."""
        job = self._job
        assert job.geometry is not None
        for table in saved:
            if "status" in table:
                self.ended[table["key"]] = table["status"]
                continue
            step = Step(**table | {"pid": 0, "start": 0, "launch": ""})
            self.steps[step.key] = step
            args = self._first_command(self._args(step))
            places = ranks.get(step.key, {})
            env: dict[str, str] = {}
            if places:
                hostfile = job.run_dir.steps / f"{step.key}.hosts"
                hostfile.write_text("".join(f"{job.geometry.nodes[places[r]]}\n" for r in sorted(places)))
                hostfile.chmod(0o644)
                args = srun_args.relaunch_command(args, len(places))
                env = {"SLURM_HOSTFILE": str(hostfile)}
            await self.launch(step, args, env, without=srun_args.NODE_VARIABLES if places else ())

    def adopt(self, state: dict[str, Any]) -> None:
        """Go on with the steps that an earlier agent had started."""
        for table in state.get("steps", []):
            if "status" in table:
                self.ended[table["key"]] = table["status"]
                continue
            if not table["pid"]:  # it was never started: the shepherd asks for it again
                continue
            step = Step(**table)
            self.steps[step.key] = step
        for table in state.get("on_node", []):
            ended = {int(rank): status for rank, status in table["ended"].items()}
            self.on_node[table["key"]] = StepOnNode(**table | {"ended": ended})

    def state(self) -> dict[str, Any]:
        """For the journal and for images: everything needed to go on. Of steps that have ended: key and status."""
        ended = [{"key": key, "status": status} for key, status in self.ended.items() if key not in self.steps]
        return {
            "steps": [*(step.as_dict() for step in self.steps.values()), *ended],
            "on_node": [step.as_dict() for step in self.on_node.values()],
        }


# Names that prlimit(1) has for the kernel's numbers.
_LIMITS = {
    0: "cpu", 1: "fsize", 2: "data", 3: "stack", 4: "core", 5: "rss", 6: "nproc", 7: "nofile", 8: "memlock", 9: "as",
    10: "locks", 11: "sigpending", 12: "msgqueue", 13: "nice", 14: "rtprio", 15: "rttime",
}  # fmt: skip
_UNLIMITED = 18446744073709551615


def limits_argv(limits: list[str]) -> list[str]:
    """A prefix that gives the real srun the proxy's resource limits: srun hands its own to every task.

    limits: `number:soft:hard`, as in the frame SRUN. A limit that the agent cannot give stays lower.
    """
    argv = []
    for text in limits:
        number, soft, hard = map(int, text.split(":"))
        if number not in _LIMITS:
            continue
        ceiling = resource.getrlimit(number)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        shown = ["unlimited" if value >= _UNLIMITED else str(value) for value in (soft, hard)]
        argv.append(f"--{_LIMITS[number]}={shown[0]}:{shown[1]}")
    return [find_program("prlimit"), *argv, "--"] if argv else []


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(item.partition("=")[::2] for item in text.split("\0") if "=" in item)


def _shown(said: Path) -> str:
    try:
        return said.read_text(errors="replace").strip()[-300:]
    except OSError:
        return "no words of it are left"


def _read_status(path: Path) -> int:
    try:
        # The directory is the user's: no link is followed, and a pipe holds nobody up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor) as file:
            return int(file.read(32)) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _FAILED
    except (OSError, ValueError):
        return _FAILED  # the wrapper was killed before it could tell
