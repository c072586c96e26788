"""gpucr status."""

from __future__ import annotations

from typing import Annotated

import typer

from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask


def status(json: Annotated[bool, typer.Option("--json", help=output.JSON_HELP)] = False) -> None:
    """The agent of this node and its protected jobs."""
    answer = ask("status")
    if json:
        output.as_json(answer | {"type": "status"})
        return
    state = f"CRIU {answer['criu']}" if answer["criu"] else f"no protection: {answer['problem']}"
    print(f"node {answer['node']}: {state}")
    rows = [
        (j["job"], j["uid"], j["phase"], j["run"], j["last"].get("checkpoint") or j["last"].get("restored") or "-")
        for j in answer["jobs"]
    ]
    if rows:
        output.table(("JOB", "UID", "PHASE", "RUN", "LAST CHECKPOINT"), rows)
