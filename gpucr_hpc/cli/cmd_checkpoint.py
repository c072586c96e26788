"""gpucr checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import Json
from gpucr_hpc.units import format_bytes, format_duration


def checkpoint(
    job: Annotated[str, typer.Argument(help="Job id.")],
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Requeue the job after the commit; it leaves its nodes.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="As --requeue, and hold it until `scontrol release`.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Write everything, also what an earlier checkpoint of the job has.")
    ] = False,
    json: Json = False,
) -> None:
    """Checkpoint a job now, wherever it runs. The job goes on after it."""

    def progress(record: dict[str, Any]) -> None:
        if sys.stderr.isatty() and not json:
            print(f"\r\x1b[Kjob {record['job']}: {record['phase']}{_how_far(record)} ...", end="", file=sys.stderr)

    report = ask("checkpoint", job=job, requeue=requeue, stop=stop, full=full, progress=progress)["checkpoint"]
    if json:
        output.as_json({"type": "checkpoint", **report})
        return
    print(
        f"job {job}: checkpoint {report['checkpoint']} in {format_duration(report['total_s'])}, "
        f"{format_bytes(report['bytes_plain'])}, {format_bytes(report['bytes_stored'])} stored"
    )


def _how_far(record: dict[str, Any]) -> str:
    """Bytes, rate and time left of a dump under way; empty before and after it."""
    done = record.get("progress")
    if not done:
        return ""
    text = f", {format_bytes(done['bytes'])} of {format_bytes(done['of_bytes'])}"
    left_s = done["left_s"]
    if not left_s:
        return text
    rate = int((done["of_bytes"] - done["bytes"]) / left_s)
    return f"{text}, {format_bytes(rate)}/s, {format_duration(left_s)} left"
