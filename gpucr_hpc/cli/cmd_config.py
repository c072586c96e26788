"""gpucr config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.options import Json
from gpucr_hpc.config import load

app = typer.Typer(help="Configuration of this node.", no_args_is_help=True)


@app.command("check")
def check(
    path: Annotated[Path | None, typer.Argument(help="File to check.")] = None,
    json: Json = False,
) -> None:
    """Read the configuration and say whether it is valid."""
    load(path)
    if json:
        output.as_json({"type": "config_check", "good": True})
    else:
        print("configuration: good")


@app.command("show")
def show() -> None:
    """Print every value in force, as JSON."""
    output.as_json({"type": "config", **dataclasses.asdict(load())})
