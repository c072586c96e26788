"""The line that `gpucr checkpoint` shows while it waits."""

from __future__ import annotations

from gpucr_hpc.cli.cmd_checkpoint import _how_far


def test_bytes_rate_and_time_left():
    """As much as is known: nothing, bytes, or rate and seconds too."""
    assert _how_far({"phase": "checkpointing"}) == _how_far({"progress": None}) == ""
    assert ", 0 B of 2 GiB" == _how_far({"progress": {"bytes": 0, "of_bytes": 2 << 30, "left_s": None}})
    text = _how_far({"progress": {"bytes": 1 << 30, "of_bytes": 2 << 30, "left_s": 4.0}})
    assert ", 1 GiB of 2 GiB, 256 MiB/s, 4.00 s left" == text
