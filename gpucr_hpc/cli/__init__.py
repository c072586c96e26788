"""The command `gpucr`. One module for each command; data on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys

import typer

from gpucr_hpc import __version__
from gpucr_hpc.cli import (
    cmd_advise,
    cmd_agent,
    cmd_checkpoint,
    cmd_config,
    cmd_doctor,
    cmd_drain,
    cmd_inspect,
    cmd_key,
    cmd_list,
    cmd_prune,
    cmd_show,
    cmd_status,
    cmd_verify,
)
from gpucr_hpc.errors import GpucrError

app = typer.Typer(
    name="gpucr",
    help="Checkpoint, requeue and restore Slurm jobs, with no change to their code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("checkpoint")(cmd_checkpoint.checkpoint)
app.command("status")(cmd_status.status)
app.command("top")(cmd_status.top)
app.command("advise")(cmd_advise.advise)
app.command("drain")(cmd_drain.drain)
app.command("undrain")(cmd_drain.undrain)
app.command("list")(cmd_list.list_checkpoints)
app.command("show")(cmd_show.show)
app.command("inspect")(cmd_inspect.inspect)
app.command("verify")(cmd_verify.verify)
app.command("prune")(cmd_prune.prune)
app.command("doctor")(cmd_doctor.doctor)
app.command("agent")(cmd_agent.agent)
app.add_typer(cmd_key.app, name="key")
app.add_typer(cmd_config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gpucr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Entry point: the one place that turns an exception into sentence, hint and exit code."""
    try:
        app()
    except GpucrError as error:
        print(f"gpucr: error: {error}", file=sys.stderr)
        if error.advice():
            print(f"gpucr: hint: {error.advice()}", file=sys.stderr)
        if "--json" in sys.argv:
            print(json.dumps(error.as_dict()), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
