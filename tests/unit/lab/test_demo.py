"""What the demo reads from logs and outputs, and what it says at its end."""

from __future__ import annotations

import logging

from gpucr_hpc.lab import demo
from gpucr_hpc.log import _Formatter

REPORT = {
    "job_id": 7, "from_node": "n1", "to_node": "n2", "restarts": 1, "result_equal": True,
    "phases_s": {"signal_to_frozen": 0.2, "dump": 0.3, "commit": 0.01, "requeue_to_running": 2.0, "restore": 0.4},
    "bytes_plain": 3 << 20, "bytes_stored": 1 << 20,
}  # fmt: skip


def line(text: str, **fields: object) -> str:
    record = logging.LogRecord("x", logging.INFO, "f", 1, text, (), None)
    record.fields = fields
    return _Formatter().format(record)


def test_agents_log_line_is_read_back():
    event = demo.parse_event("n1", line("checkpoint begins", job="7", reason="a b='c'", budget_s=59.0, empty=""))
    assert event is not None
    assert ("n1", "checkpoint begins") == (event.node, event.text)
    assert {"job": "7", "budget_s": "59.000", "empty": ""}.items() <= event.fields.items()
    assert "a b=" in event.fields["reason"]
    assert "agent stops" == demo.parse_event("n1", line("agent stops")).text


def test_other_lines_are_passed_over():
    for text in ("", "Traceback (most recent call last):", '  File "x", line 1'):
        assert None is demo.parse_event("n1", text)


def test_program_lines():
    """Slurm's and gpucr's own lines in the output are not the program's."""
    output = ["step 0", "[2026-11-27T23:52:38] error: *** JOB 7 ...", "gpucr: restored on n2", "RESULT 1"]
    assert ["step 0", "RESULT 1"] == demo.program_lines(output)


def test_closing_lines():
    text = "\n".join(demo.closing_lines(REPORT))
    for word in (
        "from n1 to n2",
        "0.200 s",
        "0.300 s",
        "0.010 s",
        "2.000 s",
        "0.400 s",
        "3 MiB plain",
        "1 MiB",
        ": yes",
    ):
        assert word in text
    assert "NO" in "\n".join(demo.closing_lines(REPORT | {"result_equal": False}))
