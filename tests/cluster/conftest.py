"""Fixtures of the tests that need a cluster: the lab, once per session, and a look at what each test left.

A lab that is up already is used and left up, but its jobs are cancelled; otherwise one is started for the
session and ended with it. Without root the tests are skipped with the reason; GPUCR_TEST_REQUIRE=lab (a comma
list) makes that skip a failure.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpucr_hpc.lab import measure_image, plugin
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.recipe import LAYERS

# So that an assertion in what the tests share says what the two sides were, as one in a test does.
pytest.register_assert_rewrite("jobs", "faultcases", "trial_tree", "capture_trial", "fill_trial")

_START_NODES = 4
_ALARM = re.compile(r"traceback|panic|please report", re.IGNORECASE)


def pytest_report_header() -> str:
    """The run's first lines say whether a lab can be had."""
    return f"lab: {_why_not() or 'can be started here'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder has the marker `cluster`."""
    for item in items:
        if "/tests/cluster/" in str(item.path):
            item.add_marker(pytest.mark.cluster)


def _why_not() -> str | None:
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root (namespaces, mounts, cgroups)"
    return None


def _unavailable(reason: str) -> None:
    """Skip, or fail when this run was told that it must have a lab."""
    if "lab" in os.environ.get("GPUCR_TEST_REQUIRE", "").split(","):
        pytest.fail(f"GPUCR_TEST_REQUIRE has lab: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_root() -> None:
    """Skips where there can be no lab, for tests that build their own."""
    reason = _why_not()
    if reason:
        _unavailable(reason)


@pytest.fixture(scope="session")
def require_lab() -> Iterator[Callable[..., Lab]]:
    """require_lab(nodes=3): the session's lab, with at least so many nodes, all on; skips when there can be
    none.
    """
    lab = Lab(say=lambda line: print(f"lab: {line}"))
    started = False

    def require(nodes: int = 3) -> Lab:
        nonlocal started
        reason = _why_not()
        if reason:
            _unavailable(reason)
        running = lab.running()
        if running is None:
            lab.up(max(nodes, _START_NODES), layers=list(LAYERS))
            started = True
        elif len(running.nodes) < nodes:
            _unavailable(f"needs {nodes} nodes, the lab that is up has {len(running.nodes)}")
        else:
            lab.up(len(running.nodes), running.settings)
        return lab

    yield require
    if started:
        lab.down()


@pytest.fixture
def lab(require_lab: Callable[..., Lab]) -> Iterator[Lab]:
    """The lab for one test: no job at its start, and at its end nothing left over and no alarm in any agent's
    log.

    After the test its jobs are cancelled, nodes that it killed are started and nodes that it drained resumed.
    """
    cluster = require_lab()
    cluster.cancel_all()
    there = cluster.leftovers(settle_s=1)  # of an earlier test or of someone at a shell: not this test's
    before = {node: _log_size(cluster, node) for node in cluster.nodes()}
    yield cluster
    _repair(cluster)
    assert cluster.leftovers(settle_s=15, ignore=there) == []  # on a busy machine a worker takes long to end
    assert [line for node in cluster.nodes() for line in _alarms(cluster, node, before[node])] == []


@pytest.fixture(scope="session")
def run_trial(
    require_root: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, dict[str, Any]]]:
    """run_trial("fill_trial"): what a trial of this folder (trial_tree.py) says of each case."""

    def run(name: str) -> dict[str, dict[str, Any]]:
        lab = Lab(say=lambda line: print(f"lab: {line}"))
        system = lab.build()
        built = plugin.build(measure_image.CHECKOUT / "spank_plugin", system, lab.cache / "measure")
        assert built is not None
        work = tmp_path_factory.mktemp(name)
        lines = list(measure_image.inside(["-m", f"tests.cluster.{name}"], work, built, system))
        return {found.pop("case"): found for found in map(json.loads, lines)}

    return run


@pytest.fixture
def mpi_lab(lab: Lab) -> Lab:
    """The lab with Open MPI, mpi4py and GROMACS."""
    running = lab.running()
    if running is None or not any("/layer-mpi-" in path for path in running.layers):
        _unavailable("the lab that is up has no Open MPI: scripts/lab up --fresh --layer mpi")
    return lab


def _repair(lab: Lab) -> None:
    for node in lab.nodes():
        if lab.pid(node) is None:
            lab.start(node)
    lab.cancel_all()
    for node, state in lab.node_states().items():
        if "drain" in state or "down" in state:
            lab.exec("ctl", ["scontrol", "update", f"nodename={node}", "state=resume"])
    lab.wait_ready(lab.nodes()[1:])
    lab.wait_agents(lab.nodes()[1:])


def _log_size(lab: Lab, node: str) -> int:
    path = lab.log_dir(node) / "agent.log"
    return path.stat().st_size if path.exists() else 0


def _alarms(lab: Lab, node: str, start: int) -> list[str]:
    """Lines that no agent should write, from byte `start` of its log on, each with what is around it."""
    path = lab.log_dir(node) / "agent.log"
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    found = [number for number, line in enumerate(lines) if _ALARM.search(line)]
    return [f"{node}: " + "\n".join(lines[max(0, number - 3) : number + 30]) for number in found]
