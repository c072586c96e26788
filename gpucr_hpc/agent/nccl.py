"""NCCL's communicators of a whole job, over the agents of all its nodes: away before a checkpoint, back after it.

Each operation opens connections of its own to the other nodes, so it does not matter what became of the checkpoint's:
after a failure, or for an agent that was started anew, communicators come back in the same way as after a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from gpucr_hpc import wire
from gpucr_hpc.agent.peers import Peer
from gpucr_hpc.capsule.processes import namespace_processes
from gpucr_hpc.engine.nccl.cut import Cut
from gpucr_hpc.engine.nccl.link import Pairs
from gpucr_hpc.engine.nccl.node import NodeRanks
from gpucr_hpc.engine.nccl.report import ON_ONE_CARD, obstacle, shared_cards
from gpucr_hpc.errors import GpucrError, JobNotProtected, NcclUnprotected, PeerLost
from gpucr_hpc.log import Log

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

log = Log(__name__)

_RESERVE_S = 2.0  # of a checkpoint's time, for what comes after the cut
_RETURN_LIMIT_S, _PAUSE_S = 60.0, 0.5
_END_LIMIT_S = 15.0


async def ranks_here(job: ProtectedJob) -> NodeRanks:
    """Connections to the ranks on this node."""
    if job.capsule is None:
        raise JobNotProtected(job=job.job, node=job.context.node)
    return await NodeRanks.connect(namespace_processes(job.capsule.init_pid), job.uid)


class RemoteRanks:
    """Implements engine.nccl.cut.Ranks for another node."""

    def __init__(self, job: str, run: int, peer: Peer) -> None:
        self._job, self._run, self._peer = job, run, peer

    async def begin(self) -> None:
        await self._peer.call("nccl_begin", job=self._job, run=self._run)

    async def order(self, word: str, pairs: Pairs = (), at: int | None = None) -> list[wire.Frame]:
        fields = {"word": word, "pairs": [list(pair) for pair in pairs], "at": at}
        answers = await self._peer.call("nccl", job=self._job, **fields)
        return [wire.Frame(wire.Type.NCCLSTATE, tuple((k, v) for k, v in answer)) for answer in answers]

    async def verify(self) -> None:
        await self._peer.call("nccl_verify", job=self._job)

    async def close(self) -> None:
        """The other node has left its processes when this returns, or it has not answered."""
        await self._peer.end("nccl_end", _END_LIMIT_S, job=self._job)


@contextlib.asynccontextmanager
async def _ranks(job: ProtectedJob, *, every: bool = True) -> AsyncIterator[list[NodeRanks | RemoteRanks]]:
    """Connections to the ranks on all nodes, for the length of a block; without `every`, to those that answer."""
    assert job.geometry is not None
    nodes: list[NodeRanks | RemoteRanks] = []
    try:
        nodes.append(await ranks_here(job))
        for node, address in job.geometry.others:
            try:
                remote = RemoteRanks(job.job, job.run, await job.context.connector.open(job.job, node, address))
                nodes.append(remote)
                await remote.begin()
            except GpucrError as error:
                if every:
                    raise
                log.warning("a node's ranks cannot be reached", job=job.job, error=str(error))
        yield nodes
    finally:
        await asyncio.shield(asyncio.gather(*(node.close() for node in nodes)))


class JobNccl:
    """Implements coordinator.checkpoint.Quiesce. Asked after `prepare`: wanted, whether any node has ranks of NCCL;
    needed, whether the images are of use only without their communicators.

    taken: whether communicators were taken away, also when they are back: the images have none.
    """

    def __init__(self, job: ProtectedJob, *, wanted: Callable[[], bool], needed: Callable[[], bool]) -> None:
        self._job, self._wanted, self._needed = job, wanted, needed
        self.taken = False
        self._back: asyncio.Task[None] | None = None

    async def settled(self, limit_s: float) -> None:
        """Wait for communicators that are just coming back, but no longer: a process answers one agent at a time, so
        preflight would not reach it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, limit_s)), self._job.nccl_turn:
                pass

    async def take(self, left_s: float) -> None:
        if not self._wanted():
            return
        job, start = self._job, time.monotonic()
        limit_s = max(0.1, min(job.context.config.cuda.nccl_limit_s, left_s - _RESERVE_S))
        async with job.nccl_turn, _ranks(job) as nodes:
            cut = Cut(job.job, nodes)
            await cut.bring_back(limit_s)  # of an earlier operation
            reports = await cut.ask()
            if shared_cards(report.cards for report in reports):
                raise NcclUnprotected(job=job.job, reason=ON_ONE_CARD)
            why = obstacle(reports)
            if why and self._needed():  # of a rank on another node, or one that came after `prepare`
                raise NcclUnprotected(job=job.job, reason=why)
            if why:
                # What shares no memory is saved as any process is.
                log.info("NCCL is left as it is", job=job.job, reason=why)
                return
            job.run_dir.quiet.touch()
            self.taken = True
            await cut.take(limit_s)
            taken = time.monotonic()
            await cut.tear_down(limit_s)
            for node in nodes:
                await node.verify()
            log.info("NCCL is quiet", job=job.job, cut_s=taken - start, torn_down_s=time.monotonic() - taken)

    async def give_back(self) -> None:
        if not self.taken:
            return
        # Not cut off with the caller: ranks of which only some have been told would wait for the others.
        self._back = self._back or asyncio.ensure_future(bring_back(self._job))
        await asyncio.shield(self._back)


async def bring_back(job: ProtectedJob) -> None:
    """Have the job's communicators again, wherever an operation has left them; must not raise.

    Other nodes' agents that are away are waited for, a minute in all. Where it cannot be, the program gets errors from
    NCCL from then on, so that it ends, and the job's output says so.
    """
    start, problem = time.monotonic(), ""
    while job.capsule is not None and job.capsule.alive():
        left_s = start + _RETURN_LIMIT_S - time.monotonic()
        if left_s <= 0:
            await _lose(job)
            break
        try:
            async with asyncio.timeout(left_s), job.nccl_turn, _ranks(job) as nodes:
                cut, problem = Cut(job.job, nodes), ""
                try:
                    await cut.bring_back(job.context.config.cuda.nccl_limit_s)
                except PeerLost:
                    raise
                except GpucrError as error:
                    await cut.release(lost=True)
                    problem = str(error)
            break
        except (GpucrError, TimeoutError) as error:  # an agent that is away, a process that cannot be reached
            problem = str(error) or "a node takes too long"
        log.warning("NCCL waits for a node", job=job.job, error=problem)
        await asyncio.sleep(_PAUSE_S)
    job.run_dir.quiet.unlink(missing_ok=True)
    if not problem:
        log.info("NCCL is back", job=job.job, took_s=time.monotonic() - start)
        return
    log.error("NCCL does not come back", job=job.job, error=problem)
    if "batch" in job.supervisors:
        await job.supervisors["batch"].print(f"NCCL's communicators could not be made again: {problem}")


async def _lose(job: ProtectedJob) -> None:
    """Let all ranks that can be reached go on without what is not there; must not raise."""
    try:
        async with asyncio.timeout(_END_LIMIT_S), _ranks(job, every=False) as nodes:
            await Cut(job.job, nodes).release(lost=True)
    except (GpucrError, TimeoutError) as error:
        log.error("ranks were not let go", job=job.job, error=str(error) or repr(error))
