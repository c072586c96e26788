"""gpucr show."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import CheckpointDir, Json
from gpucr_hpc.units import format_bytes


def show(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint id, as `gpucr list` prints it.")],
    checkpoint_dir: CheckpointDir = None,
    json: Json = False,
) -> None:
    """One checkpoint: what it holds and what it needs for a restore."""
    answer = ask("show", checkpoint=checkpoint, directory=checkpoint_dir)
    manifest = answer["manifest"]
    if json:
        output.as_json({"type": "checkpoint", "store": answer["store"], **manifest})
        return
    meta = manifest["meta"]
    rows = [
        ("checkpoint", manifest["checkpoint"]),
        ("job", f"{manifest['job']} (run {manifest['run']}, uid {manifest['uid']})"),
        ("created", f"{manifest['created']}, reason {manifest['reason']}"),
        ("phases", ", ".join(f"{k} {v:.3f} s" for k, v in meta["phases_s"].items())),
    ]
    for rank, image in zip(meta["ranks"], manifest["images"], strict=True):
        tree, host, files = rank["tree"], rank["host"], rank["files"]
        rows += [
            (f"node rank {image['node_rank']}", rank["node"]),
            ("  processes", f"{tree['processes']} with {tree['threads']} threads"),
            ("  size", f"{format_bytes(image['bytes_plain'])}, {format_bytes(image['bytes_stored'])} stored"),
            ("  needs", f"CRIU >= {host['criu']}, {host['machine']}"),
            *((f"  file {f['path']}", f"{f['size_bytes']} bytes") for f in files),
        ]
    output.fields(rows)
