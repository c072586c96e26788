"""A supervisor's connection: what it said of itself, and our orders to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpucr_hpc import wire
from gpucr_hpc.agent.policy import options_of
from gpucr_hpc.capsule.processes import start_time


@dataclass
class Supervisor:
    """One gpucr-task. key: "batch" or a step's key and task rank; pid on the host."""

    channel: wire.Channel
    hello: wire.Frame
    key: str
    started: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.started = start_time(self.pid)

    @property
    def pid(self) -> int:
        return self.channel.peer.pid

    def lives(self) -> bool:
        """Whether its process is still there and is the one that said HELLO."""
        return self.started is not None and start_time(self.pid) == self.started

    @property
    def uid(self) -> int:
        return self.channel.peer.uid

    @property
    def gid(self) -> int:
        return self.channel.peer.gid

    @property
    def restores(self) -> str:
        """The checkpoint of another job that this one is to go on from, "" as a rule."""
        return options_of(self.hello).get("restore", "")

    async def run_unprotected(self, message: str) -> None:
        """Let the command run in place; never a script that was submitted to have another job's checkpoint restored."""
        if self.restores:
            await self.refuse(f"checkpoint {self.restores} is not restored: {message}", 1)
            return
        await self.channel.send(wire.make(wire.Type.RUN, MSG=message))

    async def refuse(self, message: str, exit_code: int) -> None:
        await self.channel.send(wire.make(wire.Type.REFUSE, MSG=message, STATUS=exit_code))

    async def start(self, socket: str, env: dict[str, str], message: str, *, stdio: str, token: str) -> None:
        """stdio, token: where a step's task brings its stdio; empty for the batch script."""
        fields = {"SOCKET": socket, "TASK": self.key, "MSG": message}
        if stdio:
            fields |= {"STDIO": stdio, "TOKEN": token}
        await self.channel.send(wire.make(wire.Type.START, ("ENV", wire.env_pairs(env)), **fields))

    async def attach(self, socket: str, message: str, *, restored: bool) -> None:
        await self.channel.send(
            wire.make(wire.Type.ATTACH, SOCKET=socket, TASK=self.key, RESTORED=int(restored), MSG=message)
        )

    async def placed(self, task: str) -> None:
        await self.channel.send(wire.make(wire.Type.PLACED, TASK=task))

    async def release(self, message: str) -> None:
        await self.channel.send(wire.make(wire.Type.RELEASE, STATUS=0, MSG=message))

    async def forward(self, signal: int) -> None:
        await self.channel.send(wire.make(wire.Type.FORWARD, SIGNAL=signal))

    async def absorb(self, signal: int, message: str = "") -> None:
        await self.channel.send(wire.make(wire.Type.ABSORB, SIGNAL=signal, MSG=message))

    async def ok(self) -> None:
        await self.channel.send(wire.make(wire.Type.OK))

    async def print(self, message: str) -> None:
        await self.channel.send(wire.make(wire.Type.PRINT, MSG=message))
