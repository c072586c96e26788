"""gpucr verify."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import CheckpointDir, Json
from gpucr_hpc.errors import UsageError
from gpucr_hpc.units import format_bytes, format_duration


def verify(
    checkpoints: Annotated[list[str] | None, typer.Argument(help="Checkpoint ids.")] = None,
    job: Annotated[str | None, typer.Option("--job", help="All checkpoints of a job.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All your checkpoints.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read and authenticate every byte.")] = False,
    checkpoint_dir: CheckpointDir = None,
    json: Json = False,
) -> None:
    """Check checkpoints: signature, sizes and index; with --deep every byte.

    Exit code 0 when all are good, that of the first problem otherwise.
    """
    if not (checkpoints or job or everything):
        raise UsageError(reason="which checkpoints? Give ids, --job or --all")

    def progress(record: dict[str, Any]) -> None:
        if sys.stderr.isatty() and not json:
            print(f"\r{_progress(record)}", end="\033[K", file=sys.stderr)

    answer = ask("verify", checkpoints=checkpoints, job=job, deep=deep, directory=checkpoint_dir, progress=progress)
    if sys.stderr.isatty() and not json:
        print("\r\033[K", end="", file=sys.stderr)
    if json:
        output.as_json(answer | {"type": "verified"})
    else:
        good = "good (every byte)" if deep else "good"
        for result in answer["checkpoints"]:
            print(f"{result['checkpoint']}: {good if result['good'] else result['problem']['message']}")
    bad = [result["problem"] for result in answer["checkpoints"] if not result["good"]]
    if bad:
        raise typer.Exit(bad[0]["code"])


def _progress(record: dict[str, Any]) -> str:
    done, total, seconds = record["done_bytes"], record["total_bytes"], record["seconds"]
    text = f"{format_bytes(done)} of {format_bytes(total)}"
    if done and seconds > 1:
        text += f", {format_bytes(int(done / seconds))}/s, {format_duration(seconds * (total - done) / done)} left"
    return text
