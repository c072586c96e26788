"""MPI applications on two nodes: moved in the middle, they end as an undisturbed run."""

from __future__ import annotations

import pytest
import wheels
from jobs import Bench, JobRun, bench
from test_examples import EXAMPLES, result, submit

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

# The nodes of the lab share processors: ranks that wait let others run.
OPEN_MPI = {"MPIRUN": "mpirun.openmpi", "OMPI_MCA_mpi_yield_when_idle": "1"}


def at(lab: Lab, name: str, *files: str) -> Bench:
    on = bench(lab, name)
    for file in files:
        on.put(file, (EXAMPLES / file).read_text())
    return on


def hosts(job: JobRun) -> set[str]:
    return set(job.lab.hostnames(job.info["nodes"]))


@pytest.mark.parametrize("moves", [1, 2])
def test_mpi4py_by_open_mpi(mpi_lab, moves):
    """PRRTE's daemons, PMIx server and ranks are all in the capsules; they go on, once and again."""
    on = at(mpi_lab, f"reduce{moves}", "reduce.sh", "reduce.py")
    plain = submit(on, "plain", ["--no-checkpoint", "reduce.sh", "200", "0.001"], OPEN_MPI).end(timeout_s=120)
    moved = submit(on, "moved", ["reduce.sh", "200", "0.02"], OPEN_MPI).running()
    for number in range(moves):
        before = hosts(moved)
        moved.says(f"step {20 + 60 * number} of").move()
        assert before.isdisjoint(hosts(moved))
    moved.end(timeout_s=150)
    assert plain.out == moved.out
    assert moved.out.startswith("by Open MPI\n")
    assert moved.out.endswith("mpirun.openmpi ended with 0\n")


@pytest.fixture(scope="session")
def mpi4py(require_lab) -> str:
    """mpi4py's wheel, which takes the MPI that it is told, unpacked on the shared directory; its place in the nodes."""
    return wheels.unpacked(require_lab(), "mpi4py")


@pytest.mark.parametrize("launcher", ["srun --mpi=pmi2", "mpirun.mpich"], ids=["srun", "hydra"])
def test_mpi4py_by_mpich(lab, mpi4py, launcher):
    """The ranks of a Python program end MPI after a move as without one, started by srun or by hydra."""
    name = launcher.split()[0]
    on = at(lab, f"reduce-{name}", "reduce.sh", "reduce.py")
    env = {"MPIRUN": launcher, "PYTHONPATH": mpi4py, "MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "libmpi.so.12"}
    plain = submit(on, "plain", ["--no-checkpoint", "reduce.sh", "200", "0.001"], env).end(timeout_s=120)
    moved = submit(on, "moved", ["reduce.sh", "200", "0.02"], env).running()
    moved.says("step 20 of")
    before = hosts(moved)
    moved.move()
    assert before.isdisjoint(hosts(moved))
    moved.end(timeout_s=150)
    assert plain.out == moved.out
    assert moved.out.startswith("by MPICH\n")
    assert moved.out.endswith(f"{name} ended with 0\n")


def test_gromacs_energies_are_those_of_an_undisturbed_run(mpi_lab):
    """Molecular dynamics on two nodes in GROMACS' reproducible mode, to the last digit of energies and coordinates."""
    on = at(mpi_lab, "gromacs", "gromacs.sh")
    words = ["gromacs.sh", "3000", "2.2"]
    plain = submit(on, "plain", ["--no-checkpoint", *words], OPEN_MPI).end(timeout_s=240)
    moved = submit(on, "moved", words, OPEN_MPI).says("prepared")
    log = moved.directory / f"gromacs-{moved.id}/md.log"

    def middle() -> bool:
        text = log.read_text() if log.exists() else ""
        assert not moved.over, moved.raw
        return "\n           1000 " in text

    wait_until(middle, 120, "the first thousand steps")
    before = hosts(moved)
    moved.move().end(timeout_s=240)
    assert before.isdisjoint(hosts(moved))
    assert result(plain) == result(moved)
    assert plain.out == moved.out
