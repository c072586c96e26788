"""Fault points: each is in the code and in the documentation, and does what was ordered, once."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr_hpc
from gpucr_hpc import faults
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.faults import Point, reach

PACKAGE = Path(gpucr_hpc.__file__).parent


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    return tmp_path


def test_every_point_is_reached_once_in_the_code() -> None:
    """A point that no code comes to would be a test that cannot fail."""
    text = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "faults.py")
    used = re.findall(r"\bPoint\.([A-Z_]+)", text)
    assert sorted(used) == sorted(p.name for p in Point)


def test_the_table_is_documented() -> None:
    """docs/architecture.md has the same numbers, names, places and states."""
    document = Path(__file__).parents[2] / "docs/architecture.md"
    if not document.exists():
        pytest.skip("an installed package has no docs")
    rows = [f"| {p.number} | `{p.label}` | {p.where} | {p.state} |" for p in Point]
    assert rows == [line for line in document.read_text().splitlines() if re.match(r"\| \d+ \| `", line)]
    assert len({p.number for p in Point}) == len({p.label for p in Point}) == len(Point)


def test_only_the_armed_point_of_the_job_acts_and_once(directory: Path) -> None:
    """Another job, another point and a second time pass."""
    (directory / "7").write_text("frozen fail\n")
    asyncio.run(reach(Point.FROZEN, "8"))
    asyncio.run(reach(Point.LOCKED, "7"))
    with pytest.raises(GpucrError, match="6, frozen"):
        asyncio.run(reach(Point.FROZEN, "7"))
    asyncio.run(reach(Point.FROZEN, "7"))


def test_a_stopped_agent_serves_on_until_it_is_let_go(directory: Path) -> None:
    """`stop` tells where it stands, and only this job waits."""

    async def case() -> list[str]:
        (directory / "7").write_text("after commit stop")
        waiting = asyncio.ensure_future(reach(Point.COMMITTED, "7"))
        while not (directory / "7.at").exists():
            await asyncio.sleep(0)
        await reach(Point.COMMITTED, "8")
        seen = [(directory / "7.at").read_text(), str(waiting.done())]
        (directory / "7.at").unlink()
        await waiting
        return seen

    assert asyncio.run(case()) == ["after commit", "False"]


def test_kill_is_a_sigkill(directory: Path) -> None:
    """The process ends without any clean-up."""
    (directory / "7").write_text("frozen kill")
    code = "import asyncio\nfrom gpucr_hpc.faults import *\nasyncio.run(reach(Point.FROZEN, '7'))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_an_unknown_action_is_an_error(directory: Path) -> None:
    """A mistake in a test must not look like a passed one."""
    (directory / "7").write_text("frozen sleep")
    with pytest.raises(ValueError, match="unknown action"):
        asyncio.run(reach(Point.FROZEN, "7"))


def test_without_the_variable_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Production agents look at no file."""
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "7").write_text("frozen kill")
    asyncio.run(reach(Point.FROZEN, "7"))
