"""gpucr prune."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import CheckpointDir, Json
from gpucr_hpc.errors import UsageError
from gpucr_hpc.units import format_bytes, format_duration, parse_duration


def prune(
    job: Annotated[str | None, typer.Argument(help="Job id; without it, all your jobs.")] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", help="Keep this many of the newest good checkpoints of each job.")
    ] = None,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", help="Keep what is younger than this, such as 12h or 7d.")
    ] = None,
    orphans: Annotated[
        str | None,
        typer.Option("--orphans", help="Remove remains of dead writers that have not changed for so long, such as 1d."),
    ] = None,
    checkpoint_dir: CheckpointDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints that neither limit keeps. The newest good one of a job that is not over always stays."""
    if keep_last is None and keep_within is None and orphans is None:
        raise UsageError(reason="what is to stay? Give --keep-last, --keep-within or --orphans")
    answer = ask(
        "prune",
        job=job,
        keep_last=keep_last,
        keep_within_s=None if keep_within is None else parse_duration(keep_within),
        orphans_s=None if orphans is None else parse_duration(orphans),
        directory=checkpoint_dir,
        dry_run=dry_run,
    )
    failed = [r for r in (*answer["removed"], *answer["orphans"]) if "problem" in r]
    if json:
        output.as_json(answer | {"type": "pruned"})
    else:
        word = "would go" if dry_run else "removed"
        rows = [
            (r["job"], r["checkpoint"], format_bytes(r.get("bytes_stored", 0)), r.get("problem", word))
            for r in answer["removed"]
        ]
        rows += [
            (r["job"], r["name"], format_duration(r["age_s"]) + " old", r.get("problem", word))
            for r in answer["orphans"]
        ]
        if rows:
            output.table(("JOB", "CHECKPOINT", "SIZE", "RESULT"), rows)
        freed = sum(r.get("bytes_stored", 0) for r in answer["removed"] if "problem" not in r)
        print(f"{len(rows) - len(failed)} {word}, {answer['kept']} kept, {format_bytes(freed)}")
    if failed:
        raise typer.Exit(60)
