"""The barrier's measurement: what is compared, and the simulated agents."""

from __future__ import annotations

import pytest

from gpucr_hpc.lab import barrier, simulated_agents
from gpucr_hpc.lab.demo.events import Event


def test_the_slowest_node_is_the_one_with_most_work_in_all_phases():
    spans = {"n1": (0.1, 0.0, 0.1, 0.7, 0.1), "n2": (0.5, 0.0, 0.1, 0.1, 0.5)}
    phases = ("make_ready", "join", "lock", "capture", "seal")
    own = [
        Event(node, 0.0, "image written", {p: str(s) for p, s in zip(phases, seconds, strict=True)})
        for node, seconds in spans.items()
    ]
    wall = {"prepare": 0.6, "gpu_lock": 0.0, "lock": 0.1, "capture": 0.3, "resume": 0.1, "seal": 0.3}
    wall |= {"commit": 0.1, "finish": 9.0}
    found = barrier.compare(wall, own)
    assert ("n2", 1.2, 1.5) == (found["slowest_node"], found["slowest_own_s"], found["wall_s"])
    assert 1.25 == pytest.approx(found["ratio"])


def test_simulated_agents_send_one_request_a_phase_to_each_node():
    found = simulated_agents.measure(4, rounds=2)
    assert 3 * len(("prepare", "join", "lock", "capture", "commit", "finish")) == found["requests"]
    assert 0 < sum(found["phases_s"].values()) <= 2 * found["overhead_s"]
