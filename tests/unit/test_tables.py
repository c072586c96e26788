"""The tables of the manual are printed from the code."""

from __future__ import annotations

import subprocess
import sys


def test_tables_are_current(pytestconfig):
    """After a change of errors or configuration: scripts/tables --write."""
    argv = [sys.executable, str(pytestconfig.rootpath / "scripts/tables"), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ("", 0) == (done.stderr, done.returncode)
