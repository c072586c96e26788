"""Jobs of the cluster tests: submitted, moved, waited for, and their output compared with an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucr_hpc import proc
from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.nodes import USERS
from gpucr_hpc.lab.wait import wait_until

ON = "--checkpoint-on-preempt"
WAYS = ("plain", "prolog", "array", "agent")  # see `under`; agent: the agent is killed in between
LONG = os.environ.get("GPUCR_TEST_LONG") == "1"  # every case of the long tests, not a choice
FAULTS = "run/lab/faults"
# What gpucr and Slurm say in a job's output besides what the job itself writes.
_FOREIGN = re.compile(r"gpucr: [^\n]*\n|(slurmstepd: |\[[^]\n]*\] )error: \*\*\*[^\n]*\n")


@dataclass
class JobRun:
    """One job; its directory is shared by all nodes, its output is in `out` and, if asked for, `err` there."""

    lab: Lab
    id: int
    user: str
    directory: Path  # on the host
    name: str
    moves: list[str] = field(default_factory=list)

    # --- state ---

    @property
    def info(self) -> dict[str, Any]:
        return self.lab.job(self.id)

    @property
    def node(self) -> str:
        return str(self.info["batch_host"])

    @property
    def restarts(self) -> int:
        return int(self.info["restart_cnt"])

    def file(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def raw(self) -> str:
        """Everything that the job, gpucr and Slurm wrote."""
        return self.file(f"{self.name}.out") + self.file(f"{self.name}.err")

    @property
    def out(self) -> str:
        """What the job wrote itself."""
        return _FOREIGN.sub("", self.file(f"{self.name}.out"))

    @property
    def err(self) -> str:
        """The same of an error file of its own."""
        return _FOREIGN.sub("", self.file(f"{self.name}.err"))

    def says(self, text: str, timeout_s: float = 60) -> JobRun:
        """Wait until the text is in the output; fails when the job ends without it."""

        def look() -> bool:
            if text in self.raw:
                return True
            if self.over and text not in self.raw:
                raise AssertionError(f"job {self.id} ended without {text!r}:\n{self.raw[-3000:]}")
            return False

        wait_until(look, timeout_s, lambda: f"{text!r} in the output of job {self.id}:\n{self.raw[-3000:]}")
        return self

    @property
    def over(self) -> bool:
        return self.lab.is_over(self.id)

    def running(self, restarts: int = 0, timeout_s: float = 60) -> JobRun:
        """Wait until the job runs for the so-many-th time."""
        self.lab.wait_job(
            self.id, lambda j: j["job_state"] == ["RUNNING"] and int(j["restart_cnt"]) >= restarts, timeout_s
        )
        return self

    def end(self, code: int = 0, state: str = "", timeout_s: float = 90) -> JobRun:
        """Wait for the end and check its exit code (128+N: signal N) and state."""
        wait_until(lambda: self.over, timeout_s, lambda: f"the end of job {self.id}:\n{self.raw[-3000:]}")
        info = self.info
        status = info["exit_code"]
        signal = status["signal"]["id"]["number"] if "signal" in status else 0
        got = 128 + signal if signal else status["return_code"]["number"]
        assert (got, self.raw[-3000:]) == (code, self.raw[-3000:])
        wanted = state or ("COMPLETED" if code == 0 else "FAILED")
        assert info["job_state"] == [wanted]
        return self

    def whole(self, code: int = 3) -> JobRun:
        """Tell a `programs.count` job to stop: every line once and in order, on output and in its file."""
        (self.directory / f"{self.name}.stop").touch()
        self.end(code)
        numbers = range(1, len(self.file(f"{self.name}.log").splitlines()) + 1)
        last = f"the last of {len(numbers)} lines\n"
        assert self.file(f"{self.name}.log").split() == [str(n) for n in numbers]
        assert self.out == "".join(f"line {n}\n" for n in numbers) + last
        return self

    # --- orders ---

    def gpucr(self, *argv: str, node: str = "", user: str = "", check: bool = True) -> proc.Result:
        return self.lab.exec(node or self.node, ["gpucr", *argv], user=user or self.user, check=check)

    def checkpoint(self, *options: str) -> dict[str, Any]:
        """`gpucr checkpoint` where the job runs; its report."""
        report: dict[str, Any] = json.loads(self.gpucr("checkpoint", str(self.id), *options, "--json").stdout)
        return report

    def move(self) -> JobRun:
        """Checkpoint and requeue by demand; returns when the job is restored elsewhere."""
        before, restarts = self.node, self.restarts
        self.moves.append(before)
        self.checkpoint("--requeue")
        return self.back(restarts + 1)

    def back(self, restarts: int, timeout_s: float = 60) -> JobRun:
        """Wait until the job was restored for the so-many-th time."""

        def look() -> bool:
            if self.raw.count("gpucr: restored on") >= restarts:
                return True
            if self.over:
                raise AssertionError(f"job {self.id} ended, not restored:\n{self.raw[-3000:]}")
            return False

        wait_until(look, timeout_s, lambda: f"restore {restarts} of job {self.id}:\n{self.raw[-3000:]}")
        return self

    def preempt(self) -> JobRun:
        """Preempt it by a job of the other partition that takes its whole node; returns when it is restored."""
        node, restarts = self.node, self.restarts
        self.moves.append(node)
        high = take(self.lab, node)
        self.back(restarts + 1)
        assert self.node != node
        self.lab.exec("ctl", ["scancel", str(high)])
        return self

    def cancel(self) -> None:
        self.lab.exec("ctl", ["scancel", str(self.id)])

    def store(self) -> Path:
        """The job's directory in the store, on the host."""
        return self.lab.state / "shared/gpucr" / str(self.id)

    def sets(self) -> list[str]:
        """Complete checkpoints in the store, oldest first."""
        return sorted(p.parent.name for p in self.store().glob("*/manifest"))


def take(lab: Lab, node: str) -> int:
    """A job of the high partition on a whole node; it runs until it is cancelled."""
    script = "#!/bin/bash\nexec sleep 600\n"
    return lab.sbatch(script, "bob", "-p", "high", "--exclusive", "-w", node, "-o", "/dev/null")


@dataclass
class Bench:
    """Submits jobs into one shared directory of a user."""

    lab: Lab
    directory: Path
    user: str = "alice"
    count: int = 0

    @property
    def inside(self) -> str:
        """The directory as the nodes see it."""
        return f"/shared/home/{self.user}/{self.directory.name}"

    def put(self, name: str, text: str) -> str:
        """A file in the directory; its path in the nodes."""
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)
        os.chown(path, USERS[self.user], 100)
        return f"{self.inside}/{name}"

    def compile(self, name: str, text: str, *options: str) -> str:
        """A C program, built with the nodes' compiler; its path in the nodes."""
        source = self.put(f"{name}.c", text)
        target = f"{self.inside}/{name}"
        self.lab.exec("n1", ["gcc", "-O1", "-o", target, source, "-pthread", *options], user=self.user)
        return target

    def submit(self, script: str, *options: str, name: str = "", protected: bool = True) -> JobRun:
        """Submit a script; standard output and error go to NAME.out unless options say otherwise."""
        self.count += 1
        name = name or f"job{self.count}"
        text = textwrap.dedent(script).lstrip("\n")
        if not text.startswith("#!"):
            text = "#!/bin/bash\n" + text
        argv = [f"--output={self.inside}/{name}.out", f"--chdir={self.inside}", f"--job-name={name}", *options]
        job = self.lab.sbatch(text, self.user, *([ON] if protected else []), *argv)
        return JobRun(self.lab, job, self.user, self.directory, name)

    def undisturbed(self, script: str, *options: str, name: str = "", code: int = 0) -> JobRun:
        """The same script without protection, to its end."""
        return self.submit(script, *options, name=name or f"plain{self.count + 1}", protected=False).end(code)


def bench(lab: Lab, name: str, user: str = "alice") -> Bench:
    """An empty directory of that name in the user's home."""
    directory = lab.state / "shared/home" / user / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.chown(directory, USERS[user], 100)
    return Bench(lab, directory, user)


# --- agents ---


def arm(job: JobRun, point: Point, action: str = "kill", *, nodes: Iterable[str]) -> None:
    """Let these nodes' agents meet a fault when they next come to this point with this job."""
    for node in nodes:
        (job.lab.root(node) / FAULTS / str(job.id)).write_text(f"{point.label} {action}\n")


def fired(job: JobRun, node: str, timeout_s: float = 60) -> None:
    """Wait until the fault has happened."""
    wait_until(lambda: not (job.lab.root(node) / FAULTS / str(job.id)).exists(), timeout_s, f"the fault on {node}")


def stopped_at(job: JobRun, node: str, timeout_s: float = 60) -> None:
    """Wait until the node's agent stands at the point for which `stop` was ordered."""
    at = job.lab.root(node) / FAULTS / f"{job.id}.at"
    wait_until(at.exists, timeout_s, f"job {job.id} to come to its fault point on {node}:\n{job.raw[-1000:]}")


def only_at(job: JobRun, node: str, timeout_s: float = 60) -> None:
    """As stopped_at; agents of other nodes that come to the point first are let go."""

    def look() -> bool:
        for other in set(job.lab.nodes()[1:]) - {node}:
            for name in (f"{job.id}", f"{job.id}.at"):
                (job.lab.root(other) / FAULTS / name).unlink(missing_ok=True)
        return (job.lab.root(node) / FAULTS / f"{job.id}.at").exists()

    wait_until(look, timeout_s, f"job {job.id} to come to its fault point on {node}:\n{job.raw[-1000:]}")


def disarm(job: JobRun) -> None:
    """No agent meets a fault of this job any more, and those that stand at one go on."""
    for node in job.lab.nodes()[1:]:
        if job.lab.pid(node) is not None:
            for name in (f"{job.id}", f"{job.id}.at"):
                (job.lab.root(node) / FAULTS / name).unlink(missing_ok=True)


def agent_pid(lab: Lab, node: str) -> int | None:
    return lab.daemons(node).get("agent")


def kill_agent(lab: Lab, node: str, signal: str = "KILL") -> None:
    """End the node's agent and wait for the next one."""
    old = agent_pid(lab, node)
    lab.exec(node, ["kill", f"-{signal}", str(old)])
    wait_until(lambda: agent_pid(lab, node) != old, 20, f"the end of the agent on {node}")
    agent_back(lab, node)


def agent_back(lab: Lab, node: str) -> None:
    """Wait until the node's agent, killed by a fault or by us, answers again."""
    ask = ["gpucr", "status", "--json"]
    wait_until(lambda: lab.exec(node, ask, check=False).status == 0, 20, f"an agent on {node}")


@contextmanager
def configured(lab: Lab, extra: str, nodes: Sequence[str] = ()) -> Iterator[None]:
    """More lines in the [agent] table of gpucr.toml on some nodes (all), with agents that have read them."""
    wanted = list(nodes) or lab.nodes()[1:]
    before = {node: (lab.root(node) / "etc/gpucr/gpucr.toml").read_text() for node in wanted}
    try:
        for node in wanted:
            (lab.root(node) / "etc/gpucr/gpucr.toml").write_text(before[node] + extra + "\n")
            kill_agent(lab, node, "TERM")
        yield
    finally:
        for node in wanted:
            (lab.root(node) / "etc/gpucr/gpucr.toml").write_text(before[node])
            kill_agent(lab, node, "TERM")


@contextmanager
def slurm_setting(lab: Lab, line: str) -> Iterator[None]:
    """One more line in every slurm.conf while the test runs; nodes that are off at its end are started."""

    def starts(node: str) -> int:
        return (lab.root(node) / "var/log/slurmd.log").read_text().count("] slurmd started on ")

    def write(text: str) -> None:
        for node in lab.nodes():  # one that was started anew has its files in another place
            (lab.root(node) / "etc/slurm/slurm.conf").write_text(text)
        nodes = lab.nodes()[1:]
        before = {node: starts(node) for node in nodes}
        lab.exec("ctl", ["scontrol", "reconfigure"])  # returns before any slurmd has read the file
        for node in nodes:
            wait_until(lambda node=node: starts(node) > before[node], 30, f"slurmd's new start on {node}")
        lab.wait_ready(nodes)

    before = (lab.root("ctl") / "etc/slurm/slurm.conf").read_text()
    try:
        write(before + line + "\n")
        yield
    finally:
        for node in lab.nodes():
            if lab.pid(node) is None:
                lab.start(node)
        write(before)


@contextmanager
def under(at: Bench, way: str) -> Iterator[list[str]]:
    """The ways in which jobs are run here: a site's TaskProlog, an element of an array, and those that need nothing of
    Slurm; options of sbatch for it."""
    if way == "prolog":
        prolog = at.put("prolog.sh", "#!/bin/sh\n(true) | cat\necho 'export SITE=blue'\n")
        with slurm_setting(at.lab, f"TaskProlog={prolog}"):
            yield []
    else:
        yield ["--array=7"] if way == "array" else []


def each(orders: Iterable[Callable[[], Any]]) -> list[Any]:
    """Carry out several orders at the same time; their results, or the first error."""
    orders = list(orders)
    with ThreadPoolExecutor(max(1, len(orders))) as pool:
        return [done.result() for done in [pool.submit(order) for order in orders]]
