"""gpucr verify."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask


def verify(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint id.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read and authenticate every byte.")] = False,
    checkpoint_dir: Annotated[
        str | None, typer.Option("--checkpoint-dir", help="Store of the job, if it has its own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=output.JSON_HELP)] = False,
) -> None:
    """Check a checkpoint: signature, sizes and index; with --deep every byte."""
    answer = ask("verify", checkpoint=checkpoint, deep=deep, directory=checkpoint_dir)
    if json:
        output.as_json(answer | {"type": "verified"})
    else:
        print(f"{checkpoint}: good" + (" (every byte)" if deep else ""))
