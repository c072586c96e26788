"""What is done by the clock: checkpoints every interval and before the time limit, and a look at what would stand
against one.

One loop for all jobs that this agent leads. When something is due follows from what is in the jobs' journals, so a
restarted agent goes on with the same times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from gpucr_hpc import slurm
from gpucr_hpc.agent import lead, outlook
from gpucr_hpc.agent.phase import AT_WORK, Phase
from gpucr_hpc.errors import Busy, CheckpointGivenUp, GpucrError
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_TICK_S = 0.5
_RETRY_S = 60.0  # after a failure, unless the interval is shorter
_ASK_S = 300.0  # how often slurmctld is asked for the time limit, which may be changed
_CLOSE_S = 900.0  # before the end as it was known: asked more often
_ASK_CLOSE_S = 30.0
_LOOKS_S = (5.0, 30.0, 180.0)  # after the beginning of a run; programs open most of what they use in the first seconds
_LOOK_S = 1800.0  # and later


@dataclass
class Times:
    """When a job's next checkpoints are due. All in seconds since 1970; 0 means not known.

    run: Slurm's restart count for which these hold. began: when that run was first seen. mark: last checkpoint by the
    clock. end: of the time limit, as slurmctld said at `asked`. retry: not before this the job tries to leave (again).
    told: the user knows that it will not. last_word: nothing more is to be done before the limit. looks: how often it
    was looked whether the job can be checkpointed; warned: what was said of that.
    """

    run: int = -1
    began: float = 0.0
    mark: float = 0.0
    retry: float = 0.0
    end: float = 0.0
    asked: float = 0.0
    told: bool = False
    last_word: bool = False
    looks: int = 0
    warned: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Times:
        """Read back what as_dict made, also that of an agent with other fields."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in table.items() if key in known})

    def interval_due(self, interval_s: float, now: float) -> bool:
        """Whether the next checkpoint of an interval is due."""
        return interval_s > 0 and now >= self.mark + interval_s

    def look_due(self, now: float) -> bool:
        """Whether it is time to look what stands against a checkpoint; late ones are not made up for."""
        due = False
        while now >= self.began + self._next_look_s():
            self.looks, due = self.looks + 1, True
        return due

    def _next_look_s(self) -> float:
        more = self.looks - len(_LOOKS_S) + 1
        return _LOOKS_S[self.looks] if more <= 0 else _LOOKS_S[-1] + more * _LOOK_S

    def question_due(self, now: float) -> bool:
        """Whether slurmctld is to be asked for the time limit."""
        return now - self.asked >= (_ASK_CLOSE_S if self.end and self.end - now < _CLOSE_S else _ASK_S)

    def limit_due(self, margin_s: float, now: float) -> bool:
        """Whether the time limit is so near that the job must leave now. At least half of its time it may run: a job
        with a short limit would do nothing but move."""
        if not self.end or self.last_word or now < self.retry:
            return False
        return now >= self.end - min(margin_s, (self.end - self.began) / 2)


def margin_s(configured_s: float, last: Mapping[str, Any]) -> float:
    """Seconds before the time limit at which a job leaves: the configured ones, and twice its last dump."""
    return configured_s + 2 * float(last.get("dump_s", 0.0))


class Clock:
    """The loop."""

    def __init__(self, jobs: dict[str, ProtectedJob]) -> None:
        self._jobs = jobs
        self._under_way: set[tuple[str, str]] = set()  # job, and what

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(_TICK_S)
            for job in list(self._jobs.values()):
                if job.node_rank == 0 and job.phase in AT_WORK and job.capsule:
                    self._look(job)

    def _look(self, job: ProtectedJob) -> None:
        now, times = time.time(), job.times
        if times.run != job.run:
            job.times = times = Times(run=job.run, began=now, mark=now)
            job.save()
        margin = margin_s(job.context.config.agent.timeout_margin_s, job.last)
        if job.policy.on_timeout and times.question_due(now):
            self._start(job, "limit", self._ask)
        elif job.policy.on_timeout and times.limit_due(margin, now):
            self._start(job, "limit", self._leave)
        elif job.phase is Phase.RUNNING and times.interval_due(job.policy.interval_s, now):
            self._start(job, "interval", self._periodic)
        if job.phase is Phase.RUNNING and times.look_due(now):
            self._start(job, "look", outlook.tell)

    def _start(self, job: ProtectedJob, what: str, work: Callable[[ProtectedJob], Awaitable[None]]) -> None:
        """Begin something unless it is under way. The time limit does not wait for the end of a checkpoint."""
        if (job.job, what) in self._under_way:
            return

        async def guarded() -> None:
            try:
                await work(job)
            finally:
                self._under_way.discard((job.job, what))

        self._under_way.add((job.job, what))
        job.spawn(guarded())

    async def _periodic(self, job: ProtectedJob) -> None:
        times, interval_s = job.times, job.policy.interval_s
        began = time.time()
        try:
            await lead.checkpoint(job, "interval", leave=False)
            # A store that is slow must not have the job frozen all the time.
            times.mark = max(began, time.time() - interval_s / 2)
        except CheckpointGivenUp:
            times.mark = time.time()  # the job ends, or leaves with another checkpoint
        except Busy:
            return
        except Exception as error:
            if not isinstance(error, GpucrError):
                log.exception("unexpected")
            times.mark = time.time() - interval_s + min(interval_s, _RETRY_S)
            log.error("checkpoint failed", job=job.job, reason="interval", error=str(error))
        job.save()

    async def _ask(self, job: ProtectedJob) -> None:
        times = job.times
        times.asked = time.time()
        try:
            info = await slurm.job(job.job)
        except GpucrError as error:
            log.warning("time limit not known", job=job.job, error=str(error))
            return
        if info.running and float(info.end_time) != times.end:
            times.end, times.told, times.last_word = float(info.end_time), False, False
            job.save()

    async def _leave(self, job: ProtectedJob) -> None:
        """The time limit comes near: go, if a round is left; else one more set is kept."""
        times, policy = job.times, job.policy
        try:
            info = await slurm.job(job.job)
            if not info.running or info.being_preempted:
                return  # its end, or a preemption, is dealt with by itself
            if info.end_time > times.end:
                times.end = float(info.end_time)  # it was given more time meanwhile
                return
            leave = job.timeouts < policy.rounds
            if not leave and not times.told:
                times.told = True
                await job.tell(
                    f"the time limit comes near, and the job has gone on {job.timeouts} times: it ends at the limit"
                )
            await lead.checkpoint(job, "timeout", leave=leave, info=info)
            times.last_word = not leave
        except Busy:
            return
        except Exception as error:
            if not isinstance(error, GpucrError):
                log.exception("unexpected")
            log.error("checkpoint failed", job=job.job, reason="timeout", error=str(error))
            times.retry = time.time() + job.context.config.agent.timeout_margin_s / 4
        finally:
            job.save()
