"""The one printer: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def as_json(record: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(record, indent=2 if sys.stdout.isatty() else None))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, header: bool = True) -> None:
    """A table on stdout; plain columns when stdout is no terminal, so that awk can read it."""
    if sys.stdout.isatty():
        drawn = Table(*headers, box=None, show_header=header)
        for row in rows:
            drawn.add_row(*cells(row))
        Console().print(drawn)
        return
    lines = [list(map(str, row)) for row in ([headers] if header else []) + list(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))] if lines else []
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def cells(row: Sequence[object]) -> list[Text]:
    """For a table of Rich's, which takes brackets in a string for its own marks."""
    return [Text(str(cell)) for cell in row]


def fields(pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one a line."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name.ljust(width)}  {value}")
