"""Emptying nodes: drain first, so that nothing comes back to them, then move every protected job.

Nothing is remembered outside of Slurm and the agents: a command that died is given again, finds the nodes drained and
deals with the jobs that are still there. What an agent has begun it carries to its end by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpucr_hpc import slurm
from gpucr_hpc.cli.client import ask
from gpucr_hpc.errors import GpucrError

_LOOK_INTERVAL_S = 0.5
_TRIES, _RETRY_S = 3, 5.0


@dataclass
class Leaving:
    """A job on the nodes that are to be emptied. protected: None while its agent does not answer. state: `waiting`,
    `moving`, `left`, `failed`, or `running` for one that is not protected and is waited for. took_s: seconds from the
    order to the commit."""

    job: str
    uid: int
    nodes: str
    protected: bool | None
    state: str = "waiting"
    detail: str = ""
    tries: int = 0
    not_before: float = 0.0
    took_s: float | None = None
    bytes_stored: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("tries", "not_before")}


class Drain:
    """One set of nodes. show: called with all jobs whenever something changed."""

    def __init__(self, nodes: list[str], *, others: str, parallel: int, show: Callable[[list[Leaving]], None]) -> None:
        self._nodes, self._others, self._show = nodes, others, show
        self._free = asyncio.Semaphore(parallel)
        self._jobs: dict[str, Leaving] = {}
        self._there: set[str] = set()  # as Slurm said last; some only end, or are suspended
        self._work: set[asyncio.Task[None]] = set()

    @property
    def jobs(self) -> list[Leaving]:
        return list(self._jobs.values())

    async def look(self) -> bool:
        """Ask Slurm and the agents what is on the nodes; whether anything is."""
        there = {info.job: info for info in await slurm.jobs_on(self._nodes)}
        self._there = set(there)
        now = time.monotonic()
        unsure = [info for info in there.values() if info.running and self._is_unsure(info.job, now)]
        known = await _protection(unsure)
        for info in unsure:
            job = self._jobs.setdefault(info.job, Leaving(info.job, info.uid, info.nodes, None))
            job.protected = known.get(info.job)
            if job.protected is None:
                job.detail = f"the agent on {info.batch_host} does not answer"
            elif job.protected or job.state == "waiting":
                job.state, job.detail = "waiting", ""
            else:
                job.not_before = now + _RETRY_S
        for job in self._jobs.values():
            if job.job not in there and job.state != "left":
                job.state, job.detail = "left", job.detail if job.state == "moving" else "ended by itself"
        self._show(self.jobs)
        return bool(there)

    def _is_unsure(self, name: str, now: float) -> bool:
        """Whether the agents are to be asked: the job is new here, its agent was away, or it had not come to it yet."""
        job = self._jobs.get(name)
        if job is None or job.protected is None:
            return True
        return job.state == "running" and now >= job.not_before

    async def run(self, deadline: float | None) -> bool:
        """Move what can be moved until the nodes are empty, the deadline (monotonic clock) has passed, or nothing more
        can be done; whether they are empty."""
        while await self.look():
            if deadline is not None and time.monotonic() >= deadline:
                self._give_up("the deadline has passed")
                return False
            now = time.monotonic()
            for job in self._jobs.values():
                if job.state == "waiting" and job.protected is not None and now >= job.not_before:
                    self._begin(job)
            alive = {"waiting", "moving", "left", "running"}
            hopeless = {name for name, job in self._jobs.items() if job.state not in alive}
            if deadline is None and self._there <= hopeless:
                return not await self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return True

    def _give_up(self, why: str) -> None:
        for job in self._jobs.values():
            if job.state in ("waiting", "moving", "running"):
                job.detail = f"{why}, it was {job.state}" + (f": {job.detail}" if job.detail else "")
                job.state = "failed"
        self._show(self.jobs)

    def _begin(self, job: Leaving) -> None:
        if not job.protected and self._others == "wait":
            job.state, job.detail = "running", "not protected, its end is waited for"
            job.not_before = time.monotonic() + _RETRY_S
            return
        job.state = "moving"
        task = asyncio.ensure_future(self._move(job))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _move(self, job: Leaving) -> None:
        async with self._free:
            job.tries += 1
            start = time.monotonic()
            try:
                await (self._checkpoint(job) if job.protected else self._requeue(job))
                job.took_s = round(time.monotonic() - start, 2)
            except GpucrError as error:
                job.detail = str(error)
                again = bool(job.protected) and job.tries < _TRIES
                job.state, job.not_before = ("waiting", time.monotonic() + _RETRY_S) if again else ("failed", 0.0)
            self._show(self.jobs)

    async def _checkpoint(self, job: Leaving) -> None:
        def progress(record: dict[str, Any]) -> None:
            job.detail = str(record.get("phase", ""))
            done = record.get("progress")
            if done and done["bytes"]:
                job.detail += f" {100 * done['bytes'] // max(1, done['of_bytes'])} %"

        answer = await asyncio.to_thread(
            ask, "checkpoint", job=job.job, requeue=True, reason="drain", progress=progress
        )
        job.detail, job.bytes_stored = answer["checkpoint"]["checkpoint"], answer["checkpoint"]["bytes_stored"]

    async def _requeue(self, job: Leaving) -> None:
        await slurm.requeue(job.job)
        job.detail = "not protected, requeued: it starts from its beginning"


async def _protection(jobs: list[slurm.JobInfo]) -> dict[str, bool]:
    """Whether the agents of their first nodes protect these jobs; without those whose agent does not answer, which may
    hold years of work."""
    hosts = sorted({info.batch_host for info in jobs if info.batch_host})
    if not hosts:
        return {}
    nodes = (await asyncio.to_thread(ask, "status", nodes=hosts))["nodes"]
    silent = {node["node"] for node in nodes if node.get("problem")}
    protected = {str(job["job"]) for node in nodes for job in node["jobs"] if job["node_rank"] == 0}
    return {info.job: info.job in protected for info in jobs if info.batch_host not in silent}
