"""What the demo reads from logs and outputs, and what it says at its end."""

from __future__ import annotations

import logging

from gpucr_hpc.lab.demo import events, scenario
from gpucr_hpc.lab.demo.scenario import ITERATE, RING
from gpucr_hpc.log import _Formatter

REPORT = {
    "job_id": 7, "from_node": "n1", "to_node": "n2", "restarts": 1, "result_equal": True,
    "phases_s": {"signal_to_frozen": 0.2, "dump": 0.3, "commit": 0.01, "requeue_to_running": 2.0, "restore": 0.4},
    "bytes_plain": 3 << 20, "bytes_stored": 1 << 20, "lost_work_s": 1.5,
}  # fmt: skip


def line(text: str, **fields: object) -> str:
    record = logging.LogRecord("x", logging.INFO, "f", 1, text, (), None)
    record.fields = fields
    return _Formatter().format(record)


def test_agents_log_line_is_read_back():
    event = events.parse_event("n1", line("checkpoint begins", job="7", reason="a b='c'", budget_s=59.0, empty=""))
    assert event is not None
    assert ("n1", "checkpoint begins") == (event.node, event.text)
    assert {"job": "7", "budget_s": "59.000", "empty": ""}.items() <= event.fields.items()
    assert "a b=" in event.fields["reason"]
    assert "agent stops" == events.parse_event("n1", line("agent stops")).text


def test_other_lines_are_passed_over():
    for text in ("", "Traceback (most recent call last):", '  File "x", line 1'):
        assert None is events.parse_event("n1", text)


def test_lost_work():
    """What was done after the freeze of a periodic checkpoint; nothing after one with which the job left."""
    fields = {"job": "7", "began": 1000.0, "signal_to_frozen_s": 0.5}
    left = events.parse_event("n1", line("checkpoint committed", **fields))
    went_on = events.parse_event("n1", line("checkpoint committed", **fields, freeze_s=0.1))
    assert (0.0, 9.5) == (events.lost_work_s(left, 1010.0), events.lost_work_s(went_on, 1010.0))


def test_program_lines():
    """Slurm's and gpucr's own lines in the output are not the program's."""
    output = ["step 0", "[2026-11-27T23:52:38] error: *** JOB 7 ...", "gpucr: restored on n2", "RESULT 1"]
    assert ["step 0", "RESULT 1"] == scenario.program_lines(output)


def test_closing_lines():
    text = "\n".join(scenario.closing_lines(REPORT))
    for word in (
        "from n1 to n2",
        "0.200 s",
        "0.300 s",
        "0.010 s",
        "2.000 s",
        "0.400 s",
        "1.500 s",
        "3 MiB plain",
        "1 MiB",
        ": yes",
    ):
        assert word in text
    assert "NO" in "\n".join(scenario.closing_lines(REPORT | {"result_equal": False}))


def test_several_nodes_are_lists():
    several = REPORT | scenario.places(["n1", "n2"], ["n3", "n4"])
    assert (["n1", "n2"], ["n3", "n4"]) == (several["from_nodes"], several["to_nodes"])
    assert "from n1,n2 to n3,n4" in scenario.closing_lines(several)[0]
    assert {"from_node": "n1", "to_node": "n2"} == scenario.places(["n1"], ["n2"])


def test_a_job_has_moved_only_when_none_of_its_nodes_is_an_old_one():
    assert scenario.moved(REPORT)
    assert not scenario.moved(REPORT | {"to_node": "n1"})
    assert not scenario.moved(REPORT | {"restarts": 0})
    assert not scenario.moved(REPORT | scenario.places(["n1", "n2"], ["n3", "n2"]))


def test_outputs_are_the_same_line_by_line():
    """Only lines of independent tasks may change places."""
    one = ["rank 0 of 2", "rank 1 of 2", "iteration 0 of 9", "iteration 5 of 9", "RESULT 3"]
    assert RING.same(one, [one[1], one[0], *one[2:]])
    assert not RING.same(one, [*one[:2], one[3], one[2], one[4]])
    assert not RING.same(one, [*one, one[0]])
    assert not RING.same(one, one[1:])
    assert not RING.same(one[:-1], one[:-1]), "nothing without a result is equal"
    assert not ITERATE.same(one, [one[1], one[0], *one[2:]])


def test_progress_is_read_from_the_output():
    assert 50 == RING.done(["iteration 0 of 600", "iteration 50 of 600", "RESULT 1"])
    assert 0 == ITERATE.done([])
