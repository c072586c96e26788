"""gpucr key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpucr_hpc.image.keys import generate_keys

app = typer.Typer(help="Keys of the site.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("generate")
def generate(
    directory: Annotated[Path, typer.Argument(help="Where to put them.")] = Path("/etc/gpucr/keys"),
) -> None:
    """Make a site key and a signing key. Copy them to every node; who has them can read and make checkpoints."""
    generate_keys(directory)
    print(f"{directory}: site.key and signing.key made, mode 0600")
