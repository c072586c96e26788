"""The frame of every scenario: one program runs twice side by side, something happens to one of the two jobs, which
goes on elsewhere, and at the end the results are compared.

Every figure comes from Slurm, from the agents' logs or from `gpucr`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import CONTROLLER, HOMES
from gpucr_hpc.lab.demo.events import Event, Events, lost_work_s, told
from gpucr_hpc.lab.nodes import CHECKOUT, USERS
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.units import format_bytes

_BACK_LIMIT_S, _START_LIMIT_S = 120, 60


@dataclass(frozen=True)
class Program:
    """An example as a scenario runs it.

    files: of examples/; the first is the batch script, `words` its arguments. nodes: that one job takes. progress: its
    first group is how far the program is, in a line of its output; `total` is its end, and the scenario acts at
    `act_at`. any_order: lines of tasks that print independently of each other.
    """

    files: tuple[str, ...]
    words: tuple[str, ...]
    nodes: int
    progress: re.Pattern[str]
    total: int
    act_at: int
    any_order: re.Pattern[str] = re.compile(r"(?!)")

    def done(self, output: Sequence[str]) -> int:
        """How far the program is."""
        return max((int(found[1]) for line in output if (found := self.progress.match(line))), default=0)

    def same(self, one: Sequence[str], two: Sequence[str]) -> bool:
        """Whether two outputs, without what gpucr and Slurm wrote, have a result and the same lines: none lost, none
        doubled, and in the same order where there is one."""
        ordered = [[line for line in lines if not self.any_order.match(line)] for lines in (one, two)]
        has_result = any(line.startswith("RESULT") for line in one)
        return has_result and ordered[0] == ordered[1] and sorted(one) == sorted(two)


ITERATE = Program(
    ("iterate.sh", "iterate.py"), ("80", "64", "0.1"), 1, re.compile(r"step (\d+) of"), total=80, act_at=15
)
RING = Program(
    ("ring.sh", "ring.c"), ("600", "15000"), 2, re.compile(r"iteration (\d+) of"), total=600, act_at=100,
    any_order=re.compile(r"rank |a later step, "),
)  # fmt: skip


class Show(ABC):
    """Something to be seen on a lab that is up.

    option: of scripts/demo that chooses it, empty for the default. lab_nodes, lab_settings: of the lab that is started
    for it.
    """

    option: ClassVar[str] = ""
    help: ClassVar[str]
    lab_nodes: ClassVar[int] = 4
    lab_settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lab: Lab, say: Callable[[str], None]) -> None:
        self.lab, self._say_line = lab, say
        self._start = time.monotonic()
        self._home = f"demo-{os.getpid()}"
        self._directory = lab.state / HOMES.lstrip("/") / "alice" / self._home
        self._jobs: list[int] = []

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """The whole show; the report of it."""

    @abstractmethod
    def passed(self, report: dict[str, Any]) -> bool:
        """Whether it went as it should."""

    @abstractmethod
    def closing(self, report: dict[str, Any]) -> list[str]:
        """The report for people."""

    def clean(self) -> None:
        """End what still runs of the show and remove its files."""
        if self.lab.running() is None:
            return
        self.lab.exec(CONTROLLER, ["scancel", *map(str, self._jobs)], check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    def say(self, text: str) -> None:
        self._say_line(f"[{time.monotonic() - self._start:5.1f} s] {text}")

    def submit(self, user: str, *words: str) -> int:
        """sbatch as a user types it, alice in the directory of the program; the job is cancelled at the end."""
        where = f"{HOMES}/alice/{self._home}" if user == "alice" else f"{HOMES}/{user}"
        argv = ["env", "-C", where, "sbatch", "--parsable", *words]
        job = int(self.lab.exec(CONTROLLER, argv, user=user).stdout.split(";")[0])
        self._jobs.append(job)
        return job

    def place_files(self, *names: str) -> None:
        """Copy examples into alice's directory."""
        self._directory.mkdir(parents=True)
        for name in names:
            shutil.copy2(CHECKOUT / "examples" / name, self._directory / name)
        for path in (self._directory, *self._directory.iterdir()):
            os.chown(path, USERS["alice"], 100)

    def output_file(self, kind: str, job: int) -> Path:
        """Where a job of example `kind` writes."""
        return self._directory / f"{kind}-{job}.out"


class Scenario(Show):
    """One job goes on elsewhere; a subclass says which program and what happens to its job.

    job_options: of sbatch, for the job that is disturbed.
    """

    program: ClassVar[Program] = ITERATE
    job_options: ClassVar[tuple[str, ...]] = ()
    end_limit_s: ClassVar[float] = 180

    @abstractmethod
    def disturb(self, job: int, nodes: Sequence[str]) -> None:
        """Do to the job, which runs on `nodes`, what the scenario is about; returns at once."""

    def run(self) -> dict[str, Any]:
        """The whole show; the report of it."""
        lab, program = self.lab, self.program
        names = lab.nodes()[1:]
        if len(names) < 3 * program.nodes:
            raise LabError(reason=f"the demo needs {3 * program.nodes} nodes, the lab that is up has {len(names)}")
        self.place_files(*self.program.files)
        call, beside = [program.files[0], *program.words], ",".join(names[-program.nodes :])
        reference = self.submit("alice", "-w", beside, *call)
        job = self.submit("alice", "-x", beside, *self.job_options, *call)
        self.say(f"alice: sbatch {' '.join(call)}  (twice; the script says #SBATCH --checkpoint-on-preempt)")
        if self.job_options:
            self.say(f"  job {job} with {' '.join(self.job_options)}")
        events = Events(lab)
        source = lab.hostnames(lab.wait_job(job, "RUNNING")["nodes"])
        lab.wait_job(reference, "RUNNING")
        self.say(f"job {reference} runs undisturbed on {beside}, job {job} runs on {','.join(source)}")
        at = f"step {program.act_at} of job {job}"
        wait_until(lambda: program.done(self._output(job)) >= program.act_at, _START_LIMIT_S, at)
        self.say(f"job {job} is at step {program.done(self._output(job))} of {program.total}")
        self.disturb(job, source)
        self._watch(job, events, source)
        record = self.record(events)
        shown = self._wait_end(reference, job)
        self.say(f"both jobs are over; job {job} was started {shown['restart_cnt'] + 1} times by Slurm")
        equal = self._compare(reference, job)
        return {
            "job_id": job,
            **places(source, lab.hostnames(shown["nodes"])),
            "restarts": shown["restart_cnt"],
            "result_equal": equal,
            **record,
        }

    def passed(self, report: dict[str, Any]) -> bool:
        return moved(report) and bool(report["result_equal"])

    def closing(self, report: dict[str, Any]) -> list[str]:
        return closing_lines(report)

    # --- steps of it ----------------------------------------------------------------------------------------

    def _output(self, job: int) -> list[str]:
        path = self.output_file(self.program.files[0].removesuffix(".sh"), job)
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def _watch(self, job: int, events: Events, source: Sequence[str]) -> None:
        """Tell what happens until the job is restored."""
        state = ""
        deadline = time.monotonic() + _BACK_LIMIT_S
        while time.monotonic() < deadline:
            for event in events.poll(job):
                for line in told(event):
                    self.say(f"  {line}")
                if event.text == "restored":
                    return
                if event.text in ("checkpoint failed", "job not taken"):
                    raise LabError(reason=f"{event.node}: {event.text}: {event.fields.get('error')}")
            seen = self.lab.job(job)
            now = "+".join(seen["job_state"]) + (f" on {seen['nodes']}" if seen["nodes"] else "")
            if now != state:
                self.say(f"  Slurm: job {job} is {now}")
                state = now
            time.sleep(0.1)
        raise LabError(reason=f"job {job} did not come back from {','.join(source)} within {_BACK_LIMIT_S} s")

    def left_at(self, committed: Event) -> float:
        """When the job left its nodes, in seconds since 1970; the event: of its last checkpoint."""
        return committed.when - float(committed.fields["finish"])

    def record(self, events: Events) -> dict[str, Any]:
        """Phases and sizes of the move, from the agents; the checkpoint itself may have given way to newer ones."""
        left, back = events.last("checkpoint committed"), events.last("restored")
        restore_s = float(back.fields["took_s"])
        phases = {
            "signal_to_frozen": float(left.fields["signal_to_frozen_s"]),
            "dump": float(left.fields["dump_s"]),
            "commit": float(left.fields["commit"]),
            "requeue_to_running": round(back.when - restore_s - self.left_at(left), 3),
            "restore": restore_s,
        }
        return {
            "phases_s": phases,
            "lost_work_s": lost_work_s(left, self.left_at(left)),
            "bytes_plain": int(left.fields["bytes_plain"]),
            "bytes_stored": int(left.fields["bytes_stored"]),
        }

    def _wait_end(self, reference: int, job: int) -> dict[str, Any]:
        def over() -> bool:
            first, second = (self.program.done(self._output(j)) for j in (reference, job))
            self.say(f"  undisturbed: step {first:2}   protected: step {second:2}   of {self.program.total}")
            time.sleep(2)
            return all(any(line.startswith("RESULT") for line in self._output(j)) for j in (reference, job))

        wait_until(over, self.end_limit_s, "the results")
        self.lab.wait_job(reference, "COMPLETED")
        return self.lab.wait_job(job, "COMPLETED")

    def _compare(self, reference: int, job: int) -> bool:
        """Every line that the program wrote."""
        one, two = (program_lines(self._output(number)) for number in (reference, job))
        for name, lines in (("undisturbed", one), ("protected", two)):
            self.say(f"{name:12} {next((line for line in lines if line.startswith('RESULT')), 'no result')}")
        return self.program.same(one, two)


def places(source: Sequence[str], target: Sequence[str]) -> dict[str, Any]:
    """The report's keys for where the job was and went: from_node and to_node, lists from_nodes and to_nodes for a job
    of several nodes."""
    if len(source) == 1:
        return {"from_node": source[0], "to_node": ",".join(target)}
    return {"from_nodes": list(source), "to_nodes": list(target)}


def moved(report: dict[str, Any]) -> bool:
    """Whether the job was restarted, and on none of the nodes that it had before."""
    source, target = ways(report)
    return report["restarts"] > 0 and not set(source) & set(target)


def ways(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Where the job of a report was, and where it went."""
    if "from_nodes" in report:
        return report["from_nodes"], report["to_nodes"]
    return [report["from_node"]], [report["to_node"]]


def program_lines(output: Sequence[str]) -> list[str]:
    """An output without what Slurm and gpucr wrote into it."""
    return [line for line in output if not line.startswith(("gpucr: ", "["))]


def closing_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    phases = report["phases_s"]
    own_s = phases["signal_to_frozen"] + phases["dump"] + phases["commit"]
    source, target = (",".join(names) for names in ways(report))
    return [
        f"job {report['job_id']} moved from {source} to {target} (restarts: {report['restarts']})",
        f"  signal to frozen    {phases['signal_to_frozen']:7.3f} s",
        f"  dump                {phases['dump']:7.3f} s",
        f"  commit              {phases['commit']:7.3f} s   (signal to commit: {own_s:.3f} s)",
        f"  requeue to running  {phases['requeue_to_running']:7.3f} s   (Slurm's)",
        f"  restore             {phases['restore']:7.3f} s",
        f"  size                {format_bytes(report['bytes_plain'])} plain, {format_bytes(report['bytes_stored'])} "
        "compressed and encrypted",
        f"  lost work           {report['lost_work_s']:7.3f} s",
        f"result equal to the undisturbed run: {'yes' if report['result_equal'] else 'NO'}",
    ]
