"""gpucr checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.units import format_bytes, format_duration


def checkpoint(
    job: Annotated[str, typer.Argument(help="Job id.")],
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Requeue the job after the commit; it leaves its nodes.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="As --requeue, and hold it until `scontrol release`.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Write everything, also what an earlier checkpoint of the job has.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help=output.JSON_HELP)] = False,
) -> None:
    """Checkpoint a job now, wherever it runs. The job goes on after it."""

    def progress(record: dict[str, Any]) -> None:
        if sys.stderr.isatty() and not json:
            print(f"\rjob {record['job']}: {record['phase']} ...", end="", file=sys.stderr)

    report = ask("checkpoint", job=job, requeue=requeue, stop=stop, full=full, progress=progress)["checkpoint"]
    if json:
        output.as_json({"type": "checkpoint", **report})
        return
    print(
        f"job {job}: checkpoint {report['checkpoint']} in {format_duration(report['total_s'])}, "
        f"{format_bytes(report['bytes_plain'])}, {format_bytes(report['bytes_stored'])} stored"
    )
