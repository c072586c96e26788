"""Checkpoints of jobs of very many nodes, without the nodes: the agents' real protocol, and no work behind it.

Everything between the agents is the product's: connections (agent/peers), the lead's view of another node
(agent/remote), the order of phases (coordinator/checkpoint), the signed manifest. Only what a node does by itself when
it is asked (CRIU, nft, the store) is left out, so all the time that passes is the barrier's.

One process is the lead, another one plays all other nodes, each with a listening socket and a connection of its own,
as on a cluster. Both share this machine's processors, where a cluster has one agent on each node: the times are an
upper bound. Runs in a node of the lab, which has the product's Python packages: `scripts/measure_barrier` starts it
there. Its only output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from gpucr_hpc.agent import daemon, peers
from gpucr_hpc.agent.remote import RemoteParticipant
from gpucr_hpc.coordinator.checkpoint import Budget, Timings, checkpoint
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.model import ImageEntry, Manifest, PackEntry, new_checkpoint_id

_JOB, _PORT, _LIMIT_S = "7", 16827, 120.0
_TASKS_PER_NODE = 8
_FILES_PER_NODE, _SPARE_FILES = 3, 200


def address(node_rank: int) -> str:
    """Where a simulated node listens."""
    return f"127.1.{node_rank // 250}.{node_rank % 250 + 1}"


def _image(node_rank: int) -> ImageEntry:
    """What a node says of its image: as long as a real one, of two packs."""
    packs = [PackEntry(f"r{node_rank:04}-p{pack:02}.pack", 1 << 30, "ab" * 32) for pack in range(2)]
    index = PackEntry(f"r{node_rank:04}.index", 1 << 20, "ab" * 32)
    return ImageEntry(node_rank, f"node{node_rank}", "cd" * 32, index, packs, 2 << 30, 1 << 30, 200)


def _meta(node_rank: int) -> dict[str, Any]:
    """The engine's part of the manifest, of the size that 8 tasks on a node make it."""
    flags = [f"flag{number}" for number in range(120)]
    tasks = [{"key": f"0.{node_rank * _TASKS_PER_NODE + task}", "pid": 10 + task} for task in range(_TASKS_PER_NODE)]
    return {
        "host": {"machine": "x86_64", "kernel": "6.12.0-amd64", "criu": "4.2.1", "cpu_flags": flags},
        "node": f"node{node_rank}",
        "tree": {"root": 2, "shepherd": 3, "max_pid": 100, "processes": 12, "threads": 40},
        "tasks": tasks,
        "steps": [{"key": "0", "tasks": _TASKS_PER_NODE, "ended": []}],
        "files": [],
        "outputs": [],
        "gpu": {},
    }


class SimulatedNode(peers.Session):
    """Answers as agent/member does, at once. Refuses what comes out of turn."""

    _ORDER: ClassVar = ("", "prepare", "join", "lock", "capture", "commit", "finish")
    requests = 0

    def __init__(self, node_rank: int) -> None:
        self._rank, self._reached = node_rank, ""

    async def request(self, verb: str, fields: peers.Request) -> Any:
        SimulatedNode.requests += 1
        assert self._reached == self._ORDER[self._ORDER.index(verb) - 1], f"{verb} after {self._reached!r}"
        self._reached = verb
        return await super().request(verb, fields)

    async def do_prepare(
        self, job: str, run: int, checkpoint: str, data_key: str, leave_running: bool, full: bool
    ) -> Any:
        assert (job, run, bool(data_key), leave_running, full) == (_JOB, 0, True, False, False), checkpoint
        return {"gpus": False, "nccl": False, "nccl_away": False}

    async def do_join(self, **_: Any) -> None: ...

    async def do_lock(self, **_: Any) -> dict[str, Any]:
        state = {"pmi": "idle", "status": None}
        tasks = [{"key": f"0.{task}", "pid": 10 + task} | state for task in range(_TASKS_PER_NODE)]
        return {"tasks": tasks, "steps": _meta(self._rank)["steps"]}

    async def do_capture(self, **_: Any) -> dict[str, Any]:
        return {
            "entry": _image(self._rank).as_dict(),
            "meta": _meta(self._rank),
            "dump_s": 0.0,
            "frozen_after_s": 0.0,
        }

    async def do_commit(self, **_: Any) -> None: ...

    async def do_finish(self, **_: Any) -> None: ...


async def _play(nodes: int, key: SigningKey, channel: multiprocessing.connection.Connection) -> None:
    """All nodes but the lead, until a word comes; then say how many requests there were."""
    for rank in range(1, nodes):
        await peers.serve(address(rank), _PORT, key, functools.partial(SimulatedNode, rank))
    channel.send("ready")
    await asyncio.to_thread(channel.recv)
    channel.send(SimulatedNode.requests)


def _nodes(nodes: int, seed: bytes, channel: multiprocessing.connection.Connection) -> None:
    asyncio.run(_play(nodes, SigningKey(seed), channel))


async def _checkpoint(nodes: int, connector: peers.Connector, signing: SigningKey, site: SiteKey) -> dict[str, float]:
    """One checkpoint as agent/checkpointing takes it; seconds of each phase, the lead's processor time. `job_start`
    is what the job's start took to connect to all nodes, not a part of the checkpoint."""
    identity, key, staged = new_checkpoint_id(), DataKey.generate(), asyncio.Event()
    staged.set()
    others = [(f"node{rank}", address(rank)) for rank in range(1, nodes)]
    start = time.monotonic()
    await connector.keep_ready(_JOB, others)
    job_start_s = time.monotonic() - start
    start, cpu_s, timings = time.monotonic(), time.process_time(), Timings()
    connections = await connector.open_all(_JOB, others)
    parts = [
        RemoteParticipant(
            _JOB, peer, staged, run=0, checkpoint=identity, data_key=key.reveal_hex(), leave_running=False
        )
        for peer in connections
    ]
    timings.mark("connect")

    async def publish() -> None:
        images = [ImageEntry.from_dict(part.entry) for part in parts]
        meta = {"names": [name for name, _ in others], "ranks": [part.meta for part in parts]}
        slots = [key.wrap(site, identity)]
        whole = Manifest(
            checkpoint=identity, job=_JOB, uid=1, gid=1, reason="preempt", run=0, images=images, slots=slots, meta=meta
        )
        manifest_file.encode(whole, signing)

    async def leave() -> None: ...

    await checkpoint(parts, Budget(_JOB, _LIMIT_S), agree=lambda: None, publish=publish, leave=leave, timings=timings)
    for part in parts:
        part.close()
    total_s, cpu_s = time.monotonic() - start, time.process_time() - cpu_s
    await asyncio.gather(*(peer.closed() for peer in connections))
    return timings.phases | {"total": total_s, "cpu": cpu_s, "job_start": job_start_s}


def measure(nodes: int, rounds: int) -> dict[str, Any]:
    """Checkpoints of a job of so many nodes: median seconds, the lead's processor time and memory, requests."""
    wanted = _FILES_PER_NODE * nodes + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), max(hard, wanted)))
    seed, site = os.urandom(32), SiteKey(os.urandom(32))
    key = SigningKey(seed)
    here, there = multiprocessing.Pipe()
    # A daemon: when something fails here it is ended, not waited for.
    other = multiprocessing.Process(target=_nodes, args=(nodes, seed, there), daemon=True)
    other.start()
    there.close()  # so that its death, of a port that is taken, say, ends the wait for its word
    assert here.recv() == "ready"
    base_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connector = peers.Connector(key, _PORT)
    seconds = [asyncio.run(_checkpoint(nodes, connector, key, site)) for _ in range(rounds)]
    here.send("end")
    requests = here.recv()
    other.join()
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    median = {phase: round(statistics.median(s[phase] for s in seconds), 4) for phase in seconds[0]}
    return {
        "nodes": nodes,
        "overhead_s": median.pop("total"),
        "job_start_s": median.pop("job_start"),
        "lead_cpu_s": median.pop("cpu"),
        "phases_s": median,
        "lead_memory_kib": peak_kb - base_kb,
        "requests": requests // rounds,
    }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulated_agents", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("nodes", type=int, help="of the job, the lead's own included")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(args)
    daemon.collect_seldom()  # as an agent does; the process of the other nodes inherits it
    print(json.dumps(measure(options.nodes, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
