"""Every example runs as it is, is moved in the middle, and ends as the undisturbed run beside it."""

from __future__ import annotations

import pytest
import wheels
from jobs import LONG, WAYS, Bench, JobRun, bench, under
from test_node_failure import lose

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import CHECKOUT

EXAMPLES = CHECKOUT / "examples"


def submit(at: Bench, name: str, words: list[str], env: dict[str, str]) -> JobRun:
    """sbatch as a user types it, in the directory of the scripts."""
    assigned = [f"{key}={value}" for key, value in env.items()]
    argv = ["env", "-C", at.inside, *assigned, "sbatch", "--parsable", "-o", f"{name}.out", *words]
    job = int(at.lab.exec("ctl", argv, user=at.user).stdout.split(";")[0])
    return JobRun(at.lab, job, at.user, at.directory, name)


def moved_and_undisturbed(lab: Lab, words: list[str], sign: str, **env: str) -> tuple[JobRun, JobRun]:
    """Two runs side by side; the first is moved once `sign` is in its output. Both have ended well."""
    at = bench(lab, words[0].removesuffix(".sh"))
    for path in EXAMPLES.iterdir():
        if path.is_file():
            at.put(path.name, path.read_text())
    moved, plain = (submit(at, name, words, env) for name in ("moved", "plain"))
    moved.running().says(sign).move()
    for job in (moved, plain):
        job.end(timeout_s=150)
    assert (1, 0) == (moved.restarts, plain.restarts)
    assert moved.node not in moved.moves
    return moved, plain


def result(job: JobRun) -> str:
    (line,) = (line for line in job.out.splitlines() if line.startswith("RESULT"))
    return line


@pytest.mark.parametrize(
    ("words", "sign"),
    [
        (["counter.sh", "80", "0.1"], "step 15\n"),
        (["iterate.sh", "40", "16", "0.15"], "step 10 of"),
        (["pool.sh", "120", "0.15"], "20 of 120"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_example_moves(lab, words, sign):
    """The same result, and every line of the output once and in order."""
    moved, plain = moved_and_undisturbed(lab, words, sign)
    assert result(plain) == result(moved)
    assert plain.out == moved.out


@pytest.fixture(scope="session")
def openmm(require_lab) -> str:
    """OpenMM for the lab's Python, unpacked on the shared directory; its place in the nodes."""
    return wheels.unpacked(require_lab(), "openmm")


def test_folding_moves(lab, openmm):
    """A protein that is half folded goes on to fold, bit for bit as an undisturbed one."""
    moved, plain = moved_and_undisturbed(lab, ["folding.sh", "1200"], "step 200 of", PYTHONPATH=openmm)
    assert result(plain) == result(moved)
    assert plain.out == moved.out


@pytest.mark.skipif(not LONG, reason="a minute more: GPUCR_TEST_LONG=1")
@pytest.mark.parametrize("way", WAYS)
def test_folding_survives_its_node(lab, openmm, way):
    """From the last checkpoint on another node to the same protein, each line of the output once."""
    at = bench(lab, f"folding-lost-{way}")
    for name in ("folding.sh", "folding.py"):
        at.put(name, (EXAMPLES / name).read_text())
    places = {"lost": ["-x", "n4"], "plain": ["-w", "n4"]}  # the undisturbed one is not to lose its node, too
    with under(at, way) as words:
        lost, plain = (
            submit(at, name, [*place, *words, "folding.sh", "1200"], {"PYTHONPATH": openmm})
            for name, place in places.items()
        )
        lost.running().says("step 200 of").checkpoint()
        lost.says("step 300 of")
        lose(lab, lost, lost.node, kill=way == "agent")
        for job in (lost, plain):
            job.end(timeout_s=200)
    assert result(plain) == result(lost)
    assert plain.out == lost.out
