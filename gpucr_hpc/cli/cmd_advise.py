"""gpucr advise."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import Json
from gpucr_hpc.errors import UsageError
from gpucr_hpc.units import format_duration, parse_duration


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Time from one checkpoint to the next that loses least, for a checkpoint that costs the job cost_s and a failure
    every mtbf_s on average. J. T. Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37;
    its first term is Young's.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + root / 3 + root * root / 9) - cost_s


def loss(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Part of its time that a job loses: to checkpoints, and to work done twice and restarts after failures."""
    return cost_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def advise(
    job: Annotated[str, typer.Argument(help="A protected job that has had a checkpoint.")],
    node_mtbf: Annotated[
        str, typer.Option("--node-mtbf", help="Mean time between failures of one node, such as 365d.")
    ] = "365d",
    json: Json = False,
) -> None:
    """The interval of checkpoints that loses least of a job's time, from what its last one cost (Young and Daly)."""
    (table,) = ask("status", job=job)["jobs"]
    last, nodes = table["last"], max(1, len(table["nodes"]))
    cost_s = last.get("freeze_s") or last.get("dump_s")
    if not cost_s:
        raise UsageError(reason=f"job {job} has had no checkpoint yet: take one with `gpucr checkpoint {job}`")
    mtbf_s = parse_duration(node_mtbf) / nodes
    if mtbf_s <= 0:
        raise UsageError(reason="--node-mtbf must be more than 0")
    restart_s = float(last.get("restore_s") or cost_s)
    interval_s = daly_interval_s(cost_s, mtbf_s)
    lost = loss(interval_s, cost_s, mtbf_s, restart_s)
    record = {
        "type": "advice",
        "job": job,
        "nodes": nodes,
        "cost_s": cost_s,
        "mtbf_s": mtbf_s,
        "interval_s": round(interval_s, 1),
        "loss": round(lost, 6),
        "configured_interval_s": table["interval_s"],
    }
    if json:
        output.as_json(record)
        return
    many = "1 node" if nodes == 1 else f"{nodes} nodes"
    rows = [
        ("a checkpoint costs the job", format_duration(cost_s)),
        ("a node of it fails every", f"{format_duration(mtbf_s)} ({many}, --node-mtbf {node_mtbf})"),
        ("best interval", f"--checkpoint-interval={round(interval_s)}s ({format_duration(interval_s)})"),
        ("lost with it", f"{100 * lost:.3g} % of the job's time"),
    ]
    if table["interval_s"]:
        now = loss(table["interval_s"], cost_s, mtbf_s, restart_s)
        rows.append(("lost with its own", f"{100 * now:.3g} % (every {format_duration(table['interval_s'])})"))
    output.fields(rows)
