"""gpucr list."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import CheckpointDir, Json, NoHeader
from gpucr_hpc.units import format_bytes


def list_checkpoints(
    job: Annotated[str | None, typer.Argument(help="Job id; without it, all your jobs.")] = None,
    checkpoint_dir: CheckpointDir = None,
    no_header: NoHeader = False,
    json: Json = False,
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
    output.table(("JOB", "CHECKPOINT", "STATE", "REASON", "NODES", "SIZE", "STORED"), rows, header=not no_header)
