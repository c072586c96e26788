"""gpucr drain, gpucr undrain."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from gpucr_hpc import slurm
from gpucr_hpc.cli import output
from gpucr_hpc.cli.draining import Drain, Leaving
from gpucr_hpc.cli.options import Json
from gpucr_hpc.errors import DrainIncomplete, UsageError
from gpucr_hpc.proc import run_async
from gpucr_hpc.units import format_duration, parse_duration

_HEAD = ("JOB", "USER", "NODES", "STATE", "TOOK", "DETAIL")
Nodes = Annotated[list[str], typer.Argument(help="Nodes as Slurm writes them: n1 n[3-7,9].")]


class Others(StrEnum):
    wait = "wait"
    requeue = "requeue"


class _Screen:
    """A live table on a terminal; elsewhere a line on stderr for each change."""

    def __init__(self, live: Live | None) -> None:
        self._live, self._seen = live, {"": ("", "")}

    def show(self, jobs: list[Leaving]) -> None:
        if self._live is not None:
            table = Table(*_HEAD, box=None)
            for job in jobs:
                table.add_row(*output.cells(_row(job)))
            self._live.update(table, refresh=True)
            return
        for job in jobs:
            now = (job.state, job.detail if job.state != "moving" else "")
            if self._seen.get(job.job) != now:
                self._seen[job.job] = now
                print(f"job {job.job} on {job.nodes}: {': '.join(filter(None, now))}", file=sys.stderr)


def drain(
    nodes: Nodes,
    reason: Annotated[str, typer.Option("--reason", help="Shown by sinfo -R.")],
    deadline: Annotated[
        str, typer.Option("--deadline", help="Give up after this time (10m, 1h); without it wait.")
    ] = "",
    others: Annotated[
        Others, typer.Option("--others", help="Jobs without protection: wait for their end, or requeue them.")
    ] = Others.wait,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Jobs that are moved at the same time.")] = 4,
    batch: Annotated[int, typer.Option("--batch", min=0, help="So many nodes at a time; 0: all at once.")] = 0,
    then: Annotated[
        str, typer.Option("--then", help="Shell command for each empty batch, $NODES its nodes; then undrain it.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    json: Json = False,
) -> None:
    """Empty nodes without losing work: drain them, then checkpoint and requeue every protected job on them.

    The nodes stay drained until `gpucr undrain`. Give the command again when it was cut off. Exit code 0 when they are
    empty, 75 when something is still on them.
    """
    limit_s = parse_duration(deadline) if deadline else None
    work = _Work(reason, limit_s, others.value, parallel, then, dry_run, quiet=json)
    report = asyncio.run(work.run(nodes, batch))
    if json:
        output.as_json({"type": "drain", **report})
    elif report["jobs"]:
        output.table(_HEAD, [_row(Leaving(**job)) for job in report["jobs"]])
    if not report["empty"] and not dry_run:
        left = [f"job {job['job']}: {job['detail']}" for job in report["jobs"] if job["state"] != "left"]
        raise DrainIncomplete(nodes=",".join(report["nodes"]), reason="; ".join(left) or "a job is just ending")
    if not json:
        print(f"{','.join(report['nodes'])}: {'would be drained' if dry_run else 'empty'}")


def undrain(nodes: Nodes, json: Json = False) -> None:
    """Let jobs start on drained nodes again."""

    async def work() -> list[str]:
        names = await _expand(nodes)
        drained = [name for name, states in (await slurm.node_states(names)).items() if "DRAIN" in states]
        if drained:
            await slurm.undrain(drained)
        return drained

    changed = asyncio.run(work())
    if json:
        output.as_json({"type": "undrain", "nodes": changed})
        return
    print(f"{','.join(changed)}: in service again" if changed else "none of them was drained")


async def _expand(nodes: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(await slurm.hostnames(",".join(nodes))))
    if not names:
        raise UsageError(reason="no nodes given")
    return names


class _Work:
    def __init__(
        self,
        reason: str,
        limit_s: float | None,
        others: str,
        parallel: int,
        then: str,
        dry_run: bool,
        *,
        quiet: bool,
    ) -> None:
        self._reason, self._others, self._parallel = reason, others, parallel
        self._then, self._dry_run, self._quiet = then, dry_run, quiet
        self._deadline = None if limit_s is None else time.monotonic() + limit_s

    async def run(self, nodes: Sequence[str], batch: int) -> dict[str, Any]:
        names = await _expand(nodes)
        await slurm.node_states(names)  # refuses an unknown one before anything is changed
        jobs: list[dict[str, Any]] = []
        empty, start = True, time.monotonic()
        size = batch or len(names)
        for first in range(0, len(names), size):
            found, done = await self._one(names[first : first + size])
            jobs += [job.as_dict() for job in found]
            empty &= done
            if not done and not self._dry_run:
                break  # the next batch would take away room that these still need
        took_s = round(time.monotonic() - start, 2)
        return {"nodes": names, "reason": self._reason, "empty": empty, "took_s": took_s, "jobs": jobs}

    async def _one(self, nodes: list[str]) -> tuple[list[Leaving], bool]:
        if not self._quiet and sys.stdout.isatty():
            with Live(auto_refresh=False, transient=True) as live:
                return await self._empty(nodes, _Screen(live))
        return await self._empty(nodes, _Screen(None))

    async def _empty(self, nodes: list[str], screen: _Screen) -> tuple[list[Leaving], bool]:
        work = Drain(
            nodes,
            others=self._others,
            parallel=self._parallel,
            show=(lambda _: None) if self._dry_run else screen.show,
        )
        if self._dry_run:
            empty = not await work.look()
            for job in work.jobs:
                job.state = {True: "would move", False: f"would {self._others}", None: "unknown"}[job.protected]
            return work.jobs, empty
        await slurm.drain(nodes, self._reason)
        empty = await work.run(self._deadline)
        if empty and self._then:
            done = await run_async(["/bin/sh", "-c", self._then], env={**os.environ, "NODES": " ".join(nodes)})
            done.check()
            await slurm.undrain(nodes)
        return work.jobs, empty


def _row(job: Leaving) -> tuple[str, ...]:
    try:
        user = pwd.getpwuid(job.uid).pw_name
    except KeyError:
        user = str(job.uid)
    took = "-" if job.took_s is None else format_duration(job.took_s)
    return job.job, user, job.nodes, job.state, took, job.detail
