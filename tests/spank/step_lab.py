"""Steps in a capsule without Slurm: the test is the agent, and what srun and slurmstepd would be."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpucr_hpc.wire import Frame, Type, make

from .capsule_lab import BUILD, LIMIT_S, Lab, Peer

SRUN = BUILD / "gpucr-srun"


class StepLab(Lab):
    """A capsule in which `srun` is the proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.srun = self.dir / "bin" / "srun"
        self.srun.parent.mkdir()
        self.srun.touch()
        self.control_peer: Peer | None = None

    def capsule(self, *more: str, mode: str = "start", last_pid: int = 0) -> Frame:
        return super().capsule("--bind", f"{SRUN}:{self.srun}", *more, mode=mode, last_pid=last_pid)

    def script(self, text: str, **how: object) -> tuple[subprocess.Popen[bytes], Peer]:
        """A batch script in the capsule."""
        task = self.task("sh", "-c", text, **how)  # type: ignore[arg-type]
        agent, _ = self.accept()
        env = [f"PATH={self.srun.parent}:/usr/bin:/bin", "GPUCR_CAPSULE=1", f"GPUCR_SHEPHERD={self.shepherd}"]
        agent.send(make(Type.START, ("ENV", env), SOCKET=self.shepherd, TASK="batch.0"))
        return task, agent

    def take_control(self, *known: str) -> Peer:
        self.control_peer = Peer.to(self.shepherd)
        self.peers.append(self.control_peer)
        self.control_peer.send(make(Type.CONTROL, ("KNOWN", known)))
        return self.control_peer

    def detach_all(self) -> list[str]:
        """DETACH; what it says of the tasks."""
        frame = self.detach()
        if self.control_peer:
            self.control_peer.expect(Type.DETACHED)
            self.control_peer.close()
            self.control_peer = None
        return frame.all("TASKS")


class Step:
    """A step that the agent runs for one SRUN."""

    def __init__(self, lab: StepLab, srun: Frame) -> None:
        self.lab, self.srun, self.key = lab, srun, srun.get("KEY")
        self.supervisors: dict[int, tuple[subprocess.Popen[bytes], Peer]] = {}

    def say(self, kind: Type, **fields: object) -> None:
        assert self.lab.control_peer
        self.lab.control_peer.send(make(kind, KEY=self.key, **fields))

    def plan(self, tasks: int, label: int = 0, stdin: str = "all", out: str = "", err: str = "") -> None:
        self.say(Type.PLAN, TASKS=tasks, LABEL=label, STDIN=stdin, STDOUT=out, STDERR=err, APPEND=0)

    def _supervisor(self, rank: int, **how: object) -> tuple[subprocess.Popen[bytes], Peer, Frame]:
        options = ("--step", self.key, "--rank", str(rank), "--nodeid", "3")
        task = self.lab.task(*self.srun.all("ARG"), options=options, **how)  # type: ignore[arg-type]
        agent, hello = self.lab.accept()
        self.supervisors[rank] = task, agent
        return task, agent, hello

    def task(self, rank: int, **how: object) -> Frame:
        """Start a task as srun and slurmstepd would; returns its HELLO."""
        how.setdefault("env", {k: v for k, _, v in (e.partition("=") for e in self.srun.all("ENV"))})
        _, agent, hello = self._supervisor(rank, **how)
        agent.send(
            make(
                Type.START, ("ENV", [f"RANK={rank}"]), SOCKET=self.lab.shepherd, TASK=f"{self.key}.{rank}",
                STDIO=f"127.0.0.1:{self.srun.get('PORT')}", TOKEN=self.srun.get("TOKEN"),
            )
        )  # fmt: skip
        place = agent.expect(Type.PLACE)
        assert f"{self.key}.{rank}" == place.get("TASK")
        agent.send(make(Type.PLACED, TASK=place.get("TASK")))
        return hello

    def attach(self, rank: int, restored: int = 0) -> None:
        _, agent = self.supervisors[rank]
        agent.send(make(Type.ATTACH, SOCKET=self.lab.shepherd, TASK=f"{self.key}.{rank}", RESTORED=restored))

    def attach_anew(self, rank: int) -> None:
        """After a restore: a new supervisor for the task that is back."""
        self._supervisor(rank)
        self.attach(rank, restored=1)

    def ended(self, rank: int) -> int:
        """Wait for a task's end; its supervisor's exit status."""
        task, agent = self.supervisors[rank]
        # A DETACH may have come between PLACED and GO: then the task is still held and we are asked again.
        while (frame := agent.receive()).type is Type.PLACE:
            agent.send(make(Type.PLACED, TASK=frame.get("TASK")))
        assert Type.ENDED == frame.type, frame
        agent.send(make(Type.OK))
        return task.wait(LIMIT_S)


def next_step(lab: StepLab) -> Step:
    assert lab.control_peer
    return Step(lab, lab.control_peer.expect(Type.SRUN))


def built() -> bool:
    return SRUN.exists() and Path("/run").is_dir()
