"""Tables of what users have named."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from gpucr_hpc.cli import output


def test_brackets_are_no_marks() -> None:
    """Names of files and descriptors may look like Rich's own marks, also like wrong ones."""
    table, written = Table("what", "name", box=None), io.StringIO()
    table.add_row(*output.cells(["anon_inode:[eventpoll]", "x[/y].log"]))
    Console(file=written, width=80).print(table)
    assert "anon_inode:[eventpoll]" in written.getvalue()
    assert "x[/y].log" in written.getvalue()
