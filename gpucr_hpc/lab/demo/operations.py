"""What happens to month-long jobs: a node dies, the time limit comes, a node is taken out of service."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.conf import CONTROLLER
from gpucr_hpc.lab.demo.events import Event, Events, lost_work_s
from gpucr_hpc.lab.demo.scenario import ITERATE, Program, Scenario, Show
from gpucr_hpc.lab.wait import wait_until


class NodeFailure(Scenario):
    """The job's node loses its power; what it did since its last checkpoint is done again."""

    option = "--node-failure"
    help = "the node of a job is switched off; the job goes on elsewhere from its last periodic checkpoint"
    program = Program(ITERATE.files, ("200", "64", "0.1"), 1, ITERATE.progress, total=200, act_at=60)
    job_options = ("--checkpoint-interval=3s",)

    def disturb(self, _job: int, nodes: Sequence[str]) -> None:
        self._lost_at = time.time()
        self.lab.kill(nodes[0])
        self.say(f"{nodes[0]} is off: network gone, all its processes ended at once")

    def left_at(self, _committed: Event) -> float:
        return self._lost_at


class Walltime(Scenario):
    """A job that needs longer than its time limit goes on and on."""

    option = "--walltime"
    help = "a job that is longer than its time limit checkpoints and requeues itself before it"
    program = Program(ITERATE.files, ("500", "16", "0.15"), 1, ITERATE.progress, total=500, act_at=5)
    job_options = ("--checkpoint-on-timeout", "--time=1")
    end_limit_s = 420

    def disturb(self, job: int, _nodes: Sequence[str]) -> None:
        limit = self.lab.job(job)["time_limit"]["number"]
        self.say(f"nothing is done to job {job}: its time limit is {limit} min, it needs more")

    def passed(self, report: dict[str, Any]) -> bool:
        """It need not move: any node is good for a job that only needs more time."""
        return report["restarts"] > 0 and bool(report["result_equal"])


class Drain(Show):
    """A node with seven jobs on it is emptied."""

    option = "--drain"
    help = "a node with six protected jobs, two of them MPI jobs of two nodes, and another one is emptied"
    lab_settings = ("node.CPUs=16", "DefMemPerCPU=256", "TaskPlugin=task/cgroup")
    deadline_s: ClassVar[int] = 120
    _RING = (250, 200000)
    _COUNTER = (300, 0.2)

    def run(self) -> dict[str, Any]:
        lab, nodes = self.lab, self.lab.nodes()[1:]
        if len(nodes) < 4 or int(self._slurm_node(nodes[0])["cpus"]) < 16:
            raise LabError(reason="this demo needs 4 nodes with --set node.CPUs=16: end the lab that is up first")
        self.place_files("ring.sh", "ring.c", "counter.sh", "iterate.sh", "iterate.py")
        node = nodes[0]
        steps, pause_s = self._COUNTER
        iterations, pause_us = self._RING
        self._only(nodes[:2])  # until all have started, so that they are where the show needs them
        rings = [self.submit("alice", "ring.sh", str(iterations), str(pause_us)) for _ in range(2)]
        for job in rings:  # their steps: Slurm starts none on a node that is closed, and tries again a minute later
            self._says(job, "iteration 0 of", 60)
        self._only(nodes[:1])
        counters = [self.submit("alice", "counter.sh", str(steps), str(pause_s)) for _ in range(2)]
        words = ("iterate.sh", "300", "8", "0.2")
        iterates = [self.submit("alice", *words) for _ in range(2)]
        protected = [*rings, *counters, *iterates]
        wait_until(lambda: all(self._runs(job) for job in protected), 60, "all jobs")
        self._only(nodes)
        reference = self.submit("alice", "-w", nodes[-1], *words)
        signs = (("step 5\n", counters), ("step 5 of", iterates))
        for sign, job in ((sign, job) for sign, jobs in signs for job in jobs):
            self._says(job, sign, 90)
        # Last, since the end of it is waited for: it must not come before the command.
        plain = self.submit("bob", "-w", node, "-o", "/dev/null", "--wrap", "sleep 60")
        wait_until(lambda: self._runs(plain), 60, "the unprotected job")
        here = [job for job in [*protected, plain] if node in lab.hostnames(lab.job(job)["nodes"])]
        self.say(f"on {node}: MPI jobs {rings}, counters {counters}, iterations {iterates}, unprotected {plain}")
        if len(here) != 7:
            raise LabError(reason=f"only jobs {here} are on {node}")
        events = {job: Events(lab) for job in protected}
        argv = ["gpucr", "drain", node, "--reason", "demo", "--deadline", f"{self.deadline_s}s", "--json"]
        self.say(f"root on {nodes[1]}: {' '.join(argv)}")
        report = self._order(nodes[1], argv)
        empty_state = lab.node_states()[node]
        self.say(f"{node} is {empty_state} after {report['took_s']} s")
        for job in [*protected, reference]:
            self._says(job, "RESULT", 240)
            lab.wait_job(job, "COMPLETED")
        results = {str(job): self._right(job, reference) for job in protected}
        lab.exec(nodes[1], ["gpucr", "undrain", node])
        return {
            "node": node,
            "jobs": {job["job"]: job["state"] for job in report["jobs"]},
            "empty": report["empty"] and empty_state == "drained",
            "drain_s": report["took_s"],
            "lost_work_s": max(self._lost_work_s(job, events[job]) for job in protected),
            "deadline_s": self.deadline_s,
            "restarts": {str(job): lab.job(job)["restart_cnt"] for job in protected},
            "results_right": results,
            "result_equal": all(results.values()),
        }

    def passed(self, report: dict[str, Any]) -> bool:
        moved_once = all(count == 1 for count in report["restarts"].values())
        return bool(report["empty"] and report["result_equal"] and moved_once and len(report["jobs"]) == 7)

    def closing(self, report: dict[str, Any]) -> list[str]:
        right = sum(report["results_right"].values())
        return [
            f"{report['node']}: {'empty' if report['empty'] else 'NOT EMPTY'} in {report['drain_s']} s "
            f"(deadline {report['deadline_s']} s), {len(report['jobs'])} jobs",
            f"results right: {right} of {len(report['results_right'])}, work lost: {report['lost_work_s']} s",
        ]

    # --- steps of it --------------------------------------------------------------------------------------

    def _order(self, node: str, argv: Sequence[str]) -> dict[str, Any]:
        """Give a command at a node and tell what it says while it works; its JSON."""
        pipe, said = subprocess.PIPE, ""
        with subprocess.Popen(self.lab.exec_argv(node, argv), stdout=pipe, stderr=pipe, text=True) as command:
            assert command.stderr is not None
            assert command.stdout is not None
            for said in command.stderr:
                self.say(f"  {said.rstrip()}")
            text = command.stdout.read()
        if not text.startswith("{"):
            raise LabError(reason=f"{' '.join(argv[:2])}: {said.strip()}")
        report: dict[str, Any] = json.loads(text)
        return report

    def _lost_work_s(self, job: int, events: Events) -> float:
        events.poll(job)
        left = events.last("checkpoint committed")
        return lost_work_s(left, left.when)

    def _slurm_node(self, node: str) -> dict[str, Any]:
        shown = self.lab.exec(CONTROLLER, ["scontrol", "show", "node", node, "--json=v0.0.42"]).stdout
        found: dict[str, Any] = json.loads(shown)["nodes"][0]
        return found

    def _only(self, open_nodes: Sequence[str]) -> None:
        """Let new jobs start on these nodes alone."""
        for node, state in self.lab.node_states().items():
            wanted = "resume" if node in open_nodes else "drain"
            if ("drain" in state) != (wanted == "drain"):
                argv = ["scontrol", "update", f"nodename={node}", f"state={wanted}", "reason=demo"]
                self.lab.exec(CONTROLLER, argv)

    def _runs(self, job: int) -> bool:
        return bool(self.lab.job(job)["job_state"] == ["RUNNING"])

    def _kind(self, job: int) -> str:
        return next(kind for kind in ("ring", "counter", "iterate") if self.output_file(kind, job).exists())

    def _text(self, job: int) -> str:
        found = [self.output_file(kind, job) for kind in ("ring", "counter", "iterate")]
        return "".join(path.read_text(errors="replace") for path in found if path.exists())

    def _says(self, job: int, sign: str, limit_s: float) -> None:
        wait_until(lambda: sign in self._text(job), limit_s, f"{sign!r} in the output of job {job}")

    def _right(self, job: int, reference: int) -> bool:
        """A result that is known, or that of the undisturbed run; and every line of progress once."""
        text = self._text(job)
        result = re.search(r"^RESULT (\w+)$", text, re.MULTILINE)
        marks = re.findall(r"^(?:step|iteration) (\d+)", text, re.MULTILINE)
        known = {"ring": str(ring_total(self._RING[0], 4)), "counter": str(sum(range(1, self._COUNTER[0] + 1)))}
        wanted = known.get(self._kind(job))
        if wanted is None:
            found = re.search(r"^RESULT (\w+)$", self._text(reference), re.MULTILINE)
            wanted = found[1] if found else None
        right = result is not None and result[1] == wanted and len(marks) == len(set(marks))
        shown = result[0] if result else "no result"
        self.say(f"job {job} ({self._kind(job)}): {shown}: {'right' if right else 'WRONG'}")
        return right


def ring_total(iterations: int, ranks: int) -> int:
    """What examples/ring.c prints as its result."""
    total = 0
    for i in range(iterations):
        total = (total * 31 + (i + 1) * ranks * (ranks + 1) // 2) % (1 << 64)
    return total
