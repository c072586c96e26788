"""gpucr status, gpucr top."""

from __future__ import annotations

import pwd
import sys
import time
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import Json, NoHeader
from gpucr_hpc.units import format_bytes, format_duration

_WIDE = 250  # columns of a table that goes into a file or a pipe: nothing is cut off
_HEAD = ("JOB", "USER", "NODES", "STATE", "RUN", "LAST CHECKPOINT", "AGE", "SIZE", "FROZE", "TOOK", "DONE", "LEFT")


def status(
    job: Annotated[str | None, typer.Argument(help="Job id, wherever it runs; without it, this node's jobs.")] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Jobs of all nodes.")] = False,
    no_header: NoHeader = False,
    json: Json = False,
) -> None:
    """Protected jobs: state, last checkpoint, progress; and whether agents can protect any."""
    answer = ask("status", job=job, everywhere=everywhere)
    if json:
        output.as_json(answer | {"type": "status"})
        return
    nodes = answer["nodes"] if everywhere else [answer]
    for node in nodes if job is None else []:
        if node["problem"] or not everywhere:
            print(f"node {node['node']}: {_state(node)}")
    rows = [_row(j) for node in nodes for j in node["jobs"] if j["node_rank"] == 0 or not everywhere]
    if rows:
        output.table(_HEAD, rows, header=not no_header)
    elif everywhere:
        print("no protected job runs")


def top(
    interval: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds from one look to the next.")] = 2.0,
) -> None:
    """The same of all nodes, again and again, until Ctrl-C; one table after another when stdout is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
        while True:  # Live would keep all but the last to itself
            console.print(_drawn(ask("status", everywhere=True)["nodes"]))
            sys.stdout.flush()
            time.sleep(interval)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_drawn(ask("status", everywhere=True)["nodes"]), refresh=True)
            time.sleep(interval)


def _drawn(nodes: list[dict[str, Any]]) -> Table:
    table = Table(*_HEAD, box=None, caption_justify="left")
    for node in nodes:
        for job in node["jobs"]:
            if job["node_rank"] == 0:
                table.add_row(*output.cells(_row(job)))
    problems = [f"{node['node']}: {node['problem']}" for node in nodes if node["problem"]]
    table.caption = Text("\n".join([f"{datetime.now():%H:%M:%S}", *problems]))
    return table


def _state(node: dict[str, Any]) -> str:
    return f"CRIU {node['criu']}" if node["criu"] else f"no protection: {node['problem']}"


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    last, own = job["last"], job["own_progress"]
    age_s = time.time() - last["began"] if "began" in last else None
    phase = str(job["phase"])
    if job["progress"] and job["progress"]["bytes"]:
        percent = 100 * job["progress"]["bytes"] // max(1, job["progress"]["of_bytes"])
        left = job["progress"]["left_s"]
        phase += f" {percent:.0f} %" + (f", {format_duration(left)} left" if left is not None else "")
    return (
        job["job"],
        _user(job["uid"]),
        ",".join(job["nodes"]) or "-",
        phase,
        job["run"],
        last.get("checkpoint") or last.get("restored") or "-",
        "-" if age_s is None else format_duration(age_s),
        format_bytes(last["bytes_stored"]) if "bytes_stored" in last else "-",
        format_duration(last["freeze_s"]) if "freeze_s" in last else "-",
        format_duration(last["total_s"]) if "total_s" in last else "-",
        "-" if own is None else f"{own['percent']:g} %",
        "-" if own is None or own["left_s"] is None else format_duration(own["left_s"]),
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
