"""A job of a higher partition takes the nodes of the job."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr_hpc.lab.demo.scenario import RING, Scenario


class Preemption(Scenario):
    """The default: a job of one node."""

    help = "a preempted job goes on, on another node"

    def disturb(self, job: int, nodes: Sequence[str]) -> None:
        where = ",".join(nodes)
        words = ("-p", "high", "-w", where, "-N", str(len(nodes)), "--exclusive")
        other = self.submit("bob", *words, "--wrap", "sleep 6")
        self.say(f"bob: sbatch {' '.join(words)} ...  (job {other}, outranks job {job})")


class MpiPreemption(Preemption):
    """Four MPI ranks on two nodes that exchange messages all the time."""

    option = "--mpi"
    help = "an MPI job of 4 ranks on 2 nodes, restored on two other nodes"
    lab_nodes = 6
    program = RING
