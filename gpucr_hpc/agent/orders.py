"""Orders about a job, given at any node: the agent of its first node carries them out.

A command speaks to its own node's agent alone, which knows by the kernel who asks. Is the job led elsewhere, that agent
passes the order on over the connection that agents have among themselves, with the uid of who asked. The other side
believes it, since only an agent has the cluster's key, and decides by its own configuration whether that uid may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gpucr_hpc import __version__, slurm
from gpucr_hpc.agent import lead, report
from gpucr_hpc.agent.context import Context
from gpucr_hpc.agent.job import ProtectedJob
from gpucr_hpc.agent.member import MemberSession
from gpucr_hpc.agent.phase import Phase
from gpucr_hpc.errors import Busy, GpucrError, JobNotProtected, PermissionRefused, UsageError
from gpucr_hpc.model import check_job_id

_LOOK_INTERVAL_S, _PROGRESS_INTERVAL_S = 0.1, 0.5
_REASONS = ("demand", "drain")

Say = Callable[[dict[str, Any]], None]


class Orders:
    """Carries out orders here, or has another node's agent do it."""

    def __init__(self, context: Context, jobs: dict[str, ProtectedJob], operators: set[int]) -> None:
        self._context, self._jobs, self._operators = context, jobs, operators
        self._work: set[asyncio.Task[dict[str, Any]]] = set()

    # --- here -------------------------------------------------------------------------------------------

    def _own(self, uid: int, name: str) -> ProtectedJob:
        job = self._jobs.get(name)
        if job is None or job.idle:
            raise JobNotProtected(job=name, node=self._context.node)
        if not job.may(uid, self._operators):
            raise PermissionRefused(who=f"uid {uid}", action=f"act on job {name}")
        return job

    async def status(self, uid: int, job: str = "") -> dict[str, Any]:
        """This node and those of its protected jobs that the caller may see; with job that one alone."""
        context = self._context
        chosen = [self._own(uid, job)] if job else list(self._jobs.values())
        return {
            "node": context.node,
            "version": __version__,
            "criu": context.criu.text if context.criu else None,
            "problem": str(context.criu_problem) if context.criu_problem else None,
            "jobs": [await report.of_job(j) for j in chosen if j.may(uid, self._operators) and not j.idle],
        }

    async def checkpoint(
        self,
        uid: int,
        job: str,
        requeue: bool = False,
        stop: bool = False,
        full: bool = False,
        reason: str = "demand",
    ) -> dict[str, Any]:
        """Checkpoint a job now; with requeue it leaves its nodes, with stop it is held as well; full: no references
        to earlier ones. Its report. One that is under way, and after which the job goes on, is waited for, or, with
        requeue or stop, given up."""
        found = self._own(uid, job)
        if found.capsule is None:
            raise Busy(job=job, operation="its start or its end")
        if reason not in _REASONS:
            raise UsageError(reason=f"{reason!r} is not a reason")
        while not (requeue or stop) and found.phase in (Phase.CHECKPOINTING, Phase.SEALING):
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return await lead.checkpoint(found, reason, leave=requeue or stop, hold=stop, full=full)

    # --- anywhere ---------------------------------------------------------------------------------------

    async def _lead_of(self, job: str) -> str:
        """The node whose agent leads a job: this one when it knows the job, else its batch host by Slurm's word."""
        here = self._jobs.get(check_job_id(job))
        if here is not None and not here.idle and here.node_rank == 0:
            return self._context.node
        info = await slurm.job(job)
        if not info.batch_host:
            raise JobNotProtected(job=job, node="any node: it does not run at this moment")
        return info.batch_host

    async def _at(self, node: str, verb: str, uid: int, fields: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any]
        if node == self._context.node:
            answer = await getattr(self, verb)(uid, **fields)
        else:
            (address,) = await slurm.node_addresses([node])
            async with self._context.connector.to(str(fields.get("job") or "-"), node, address) as peer:
                answer = await peer.call("order", what=verb, uid=uid, fields=fields)
        return answer

    async def status_at(self, uid: int, node: str) -> dict[str, Any]:
        """`status` of another node."""
        return await self._at(node, "status", uid, {})

    async def status_everywhere(self, uid: int, nodes: list[str] | None) -> list[dict[str, Any]]:
        """`status` of nodes, None for all that are the first one of a running job; one that does not answer has a
        problem."""

        async def ask(node: str) -> dict[str, Any]:
            try:
                return await self.status_at(uid, node)
            except GpucrError as error:
                return {"node": node, "version": None, "criu": None, "problem": str(error), "jobs": []}

        if nodes is None:
            nodes = sorted({info.batch_host for info in await slurm.running_jobs()} | {self._context.node})
        return list(await asyncio.gather(*(ask(node) for node in nodes)))

    async def status_of(self, uid: int, job: str) -> dict[str, Any]:
        """`status` of one job, wherever it runs."""
        return await self._at(await self._lead_of(job), "status", uid, {"job": job})

    async def checkpoint_of(self, uid: int, say: Say, job: str, **fields: Any) -> dict[str, Any]:
        """`checkpoint` of a job, wherever it runs; says how far it is."""
        node = await self._lead_of(job)
        work = asyncio.ensure_future(self._at(node, "checkpoint", uid, {"job": job, **fields}))
        self._work.add(work)  # it goes on when the command dies
        work.add_done_callback(self._work.discard)
        while not (await asyncio.wait({work}, timeout=_PROGRESS_INTERVAL_S))[0]:
            say({"type": "progress", "job": job, "node": node, **await self._progress(node, uid, job)})
        return work.result()

    async def _progress(self, node: str, uid: int, job: str) -> dict[str, Any]:
        try:
            (table,) = (await self._at(node, "status", uid, {"job": job}))["jobs"]
        except (GpucrError, ValueError):
            return {"phase": "gone"}
        return {"phase": table["phase"], "progress": table["progress"]}


class PeerSession(MemberSession):
    """What another agent may ask of this one: a lead of its member, and orders that were given there."""

    def __init__(self, context: Context, jobs: dict[str, ProtectedJob], orders: Orders) -> None:
        super().__init__(context, jobs)
        self._orders = orders

    async def do_order(self, what: str, uid: int, fields: dict[str, Any]) -> dict[str, Any]:
        if what not in ("status", "checkpoint"):
            raise UsageError(reason=f"an agent does not take the order {what!r}")
        answer: dict[str, Any] = await getattr(self._orders, what)(uid, **fields)
        return answer
