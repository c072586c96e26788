"""What nodes answered to `gpucr doctor --nodes` becomes one table."""

from __future__ import annotations

import json
from types import SimpleNamespace

from gpucr_hpc.cli.doctor_nodes import Finding, findings_of, rows


def finding(what: str, detail: str, *, good: bool = False) -> Finding:
    return {"what": what, "good": good, "detail": detail, "advice": "" if good else "do something"}


def test_answers_are_read():
    """Findings, also with exit code 10; else the last line that the node said, or why it was not reached."""
    found = [finding("CRIU", "too old"), finding("root", "uid 0", good=True)]
    text = json.dumps({"type": "doctor", "good": False, "findings": found})
    assert found == findings_of(SimpleNamespace(stdout=text, stderr="", exited=10))
    (lost,) = findings_of(SimpleNamespace(stdout="", stderr="bash: gpucr: not found\n", exited=127))
    assert (lost["good"], lost["detail"]) == (False, "`gpucr doctor --json`: bash: gpucr: not found")
    (silent,) = findings_of(SimpleNamespace(stdout="", stderr="", exited=1))
    assert silent["detail"].endswith("exit code 1")
    (away,) = findings_of(TimeoutError())
    assert (away["good"], away["detail"]) == (False, "TimeoutError")


def test_nodes_that_say_the_same_share_a_row():
    """One row for each finding that is bad, with its nodes, and one for the nodes where all is well."""
    well, old, key = finding("root", "uid 0", good=True), finding("CRIU", "too old"), finding("key", "missing")
    found = {"n1": [well], "n2": [well, old], "n3": [old, key], "n4": [well]}
    table = [(nodes, f["what"]) for nodes, f in rows(found)]
    assert [(["n2", "n3"], "CRIU"), (["n3"], "key"), (["n1", "n4"], "all")] == table
    assert all(f["good"] == (f["what"] == "all") for _, f in rows(found))
