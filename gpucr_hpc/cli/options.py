"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

CheckpointDir = Annotated[str | None, typer.Option("--checkpoint-dir", help="Store of the job, if it has its own.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
NoHeader = Annotated[bool, typer.Option("--no-header", help="No line of column names.")]
