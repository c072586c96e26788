"""A job of two nodes that is brought to a fault point, and how it comes through."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from threading import Thread

from jobs import Bench, JobRun, arm, only_at, stopped_at
from programs import PAIR, pair

from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

TWO = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
# A restore waits up to two minutes for a task of a step that does not come.
_SETTLE_S = 180
_RESTORED = re.compile(r"gpucr: restored on \S+ from checkpoint (\S+) ")

# The job leaves: what came long ago to its point may meet Slurm's KillWait before it is killed here.
_LEAVING = (Point.REQUEUED, Point.ENDED)

# How a job comes through: it runs on; Slurm requeues it and it is restored; it ends as failed, and is restored when
# somebody requeues it; it is held, and is restored when somebody releases it; its step ends as one whose task was
# killed, and the script goes on with its next line.
ON, BACK, FAILED, HELD = "runs on", "restored", "failed, then restored", "held, then restored"
STEP_KILLED = "step killed"


@dataclass
class Case:
    """One job and what happens to it."""

    job: JobRun
    victim: str
    point: Point
    nodes: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """Where the victim is."""
        return self.nodes[0 if self.victim.endswith("lead") else 1]

    @property
    def stands(self) -> str:
        """Where the agent stops."""
        return self.nodes[0] if self.point.where == "lead" else self.node

    def place(self) -> None:
        done = self.job.lab.exec("ctl", ["scontrol", "show", "hostnames", self.job.info["nodes"]])
        self.nodes = tuple(done.stdout.split())

    def counted(self) -> int:
        return self.job.out.count("rank 1 turn ")

    def begin(self) -> None:
        """A set to fall back to, and some turns after it."""
        self.job.says("rank 1 turn 3\n")
        self.job.checkpoint()
        before = self.counted()
        wait_until(lambda: self.counted() > before, 30, "traffic after the first checkpoint")
        self.place()

    def reach(self) -> None:
        """Bring the job to the point; its agent stops there."""
        job = self.job
        if self.point.number < Point.CHECKED.number:
            arm(job, self.point, "stop", nodes=[self.stands])
            order = {"node": self.nodes[0], "check": False}  # its answer depends on what is killed
            Thread(target=job.gpucr, args=("checkpoint", str(job.id), "--requeue"), kwargs=order).start()
            stopped_at(job, self.stands)
        else:
            arm(job, self.point, "stop", nodes=job.lab.nodes()[1:])
            job.checkpoint("--requeue")
            job.running(1)
            self.place()
            only_at(job, self.stands)

    def settle(self) -> str:
        """Wait until the job has gone on, helped by hand where it stands still; how it came through."""
        job, how = self.job, ON
        turns = self.counted()  # after the fault: at some points the job runs up to it
        while True:
            wait_until(
                lambda: job.over or self._held() or self.counted() > turns + 2,
                _SETTLE_S,
                f"job {job.id} ({self.victim}, {self.point.label}) to go on:\n{job.raw[-2000:]}",
            )
            assert how == ON or not (job.over or self._held()), f"it stands again:\n{job.raw[-3000:]}"
            if job.over and self.victim == "supervisor-other" and "status 137\n" in job.out:
                return STEP_KILLED
            if job.over:
                assert job.info["job_state"] == ["FAILED"], job.raw[-2000:]
                how = FAILED
                job.lab.exec("ctl", ["scontrol", "requeue", str(job.id)])
            elif self._held():
                how = HELD
                self._help()
            else:
                break
            wait_until(lambda: not job.over and not self._held(), 30, "Slurm to take the job up again")
        restored = _RESTORED.findall(job.raw)
        if how == ON and restored:
            how = BACK
        if restored:
            assert restored[-1] == job.sets()[-1], "not the newest set"
        return how

    def _help(self) -> None:
        """What docs/admin.md has an administrator do: Slurm has also drained the node that refused the job."""
        lab, job = self.job.lab, str(self.job.id)
        for node, state in lab.node_states().items():
            if "drain" in state:
                lab.exec("ctl", ["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        lab.exec("ctl", ["scontrol", "release", job])
        lab.exec("ctl", ["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)

    def _held(self) -> bool:
        info = self.job.info
        return info["job_state"] == ["PENDING"] and info["priority"]["number"] == 0

    def whole(self, how: str = "") -> None:
        """Let the job end: every turn once and in order, also in the ranks' own files."""
        job = self.job
        (job.directory / f"{job.name}.stop").touch()
        job.end(3)
        lines = [line for line in job.out.splitlines() if not line.startswith("srun: ")]
        killed = how == STEP_KILLED
        assert lines[-3:] == ["status 137" if killed else "status 0", "later", "later"], job.raw[-2000:]
        for rank in (0, 1):
            turns = [line for line in lines if line.startswith(f"rank {rank} turn ")]
            numbers = [str(n) for n in range(1, len(turns) + 1)]
            assert turns == [f"rank {rank} turn {n}" for n in numbers], job.raw[-3000:]
            assert (f"rank {rank} good" in lines) != killed
            file = job.file(f"{job.name}.{rank}").split()
            assert file[: len(numbers)] == numbers
            assert len(file) - len(numbers) <= int(killed)  # the line of a turn may be killed with its task


def kill(lab: Lab, case: Case) -> None:
    """kill -9 of a node or of a process of the job, which may have ended by itself only where the job leaves."""
    what, node, job = case.victim.partition("-")[0], case.node, str(case.job.id)
    pid: int | None = None
    if what == "node":
        if lab.pid(node) is not None:
            lab.kill(node)
        return
    if what == "init":
        state = lab.root(node) / f"run/gpucr/jobs/{job}/state.json"
        with contextlib.suppress(FileNotFoundError):  # the agent has removed what has ended
            pid = json.loads(state.read_text())["capsule"]["init_pid"]
    else:
        batch = case.victim.endswith("lead")
        pid = next((pid for pid, step in supervisors(lab, node, job).items() if (step == "batch") == batch), None)
    if pid is None and case.point in _LEAVING:
        return
    assert pid is not None, f"{case.victim} of job {job} is not there at {case.point.label}"
    lab.exec(node, ["kill", "-KILL", str(pid)], check=False)


def supervisors(lab: Lab, node: str, job: str) -> dict[int, str]:
    """Pids of a job's supervisors on a node, and their steps."""
    script = "for p in $(pgrep -x gpucr-task); do echo $p $(tr '\\0' ' ' </proc/$p/cmdline); done"
    found = {}
    for line in lab.exec(node, ["sh", "-c", script], check=False).stdout.splitlines():
        words = line.split()
        if "--job" in words and words[words.index("--job") + 1] == job:
            found[int(words[0])] = words[words.index("--step") + 1]
    return found


def cases(on: Bench, victim: str, points: list[Point]) -> list[Case]:
    on.put("pair.py", PAIR)
    names = [f"{victim}-{p.number}" for p in points]
    jobs = [on.submit(pair(name), *TWO, name=name) for name in names]
    return [Case(job, victim, point) for job, point in zip(jobs, points, strict=True)]
