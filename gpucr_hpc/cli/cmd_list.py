"""gpucr list."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.units import format_bytes


def list_checkpoints(
    job: Annotated[str | None, typer.Argument(help="Job id; without it, all your jobs.")] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option("--checkpoint-dir", help="Store of the job, if it has its own.")
    ] = None,
    no_header: Annotated[bool, typer.Option("--no-header", help="No line of column names.")] = False,
    json: Annotated[bool, typer.Option("--json", help=output.JSON_HELP)] = False,
) -> None:
    """Checkpoints in the store, oldest first. Root and operators see those of all users."""
    answer = ask("list", job=job, directory=checkpoint_dir)
    if json:
        output.as_json({"type": "checkpoints", "checkpoints": answer["checkpoints"]})
        return
    rows = [
        (
            c["job"],
            c["checkpoint"],
            c["state"],
            c.get("reason", "-"),
            ",".join(c.get("nodes", [])) or "-",
            format_bytes(c["bytes_plain"]) if "bytes_plain" in c else "-",
            format_bytes(c["bytes_stored"]) if "bytes_stored" in c else c.get("problem", "-"),
        )
        for c in answer["checkpoints"]
    ]
    output.table(
        ("JOB", "CHECKPOINT", "STATE", "REASON", "NODES", "SIZE", "STORED"), rows, header=not no_header
    )
