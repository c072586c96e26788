"""Slurm's commands in the lab, for tests: submit, look, wait."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.conf import CONTROLLER
from gpucr_hpc.lab.wait import wait_until

DATA_PARSER = "v0.0.42"  # both Slurm 24.11 and 26.05 have it
_UNDER_WAY = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"}
_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}

Job = dict[str, Any]


class SlurmCommands(ABC):
    """Mixed into Lab, which knows how a command gets into a node."""

    @abstractmethod
    def exec_argv(self, node: str, argv: Sequence[str], user: str | None = None) -> list[str]:
        """What runs a command in a node from outside."""

    def exec(
        self,
        node: str,
        argv: Sequence[str],
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float | None = None,
    ) -> proc.Result:
        """Run a command in a node to its end; ToolFailed when it fails and check is set."""
        done = proc.run(self.exec_argv(node, argv, user), stdin=stdin or "", timeout_s=timeout_s)
        return done.check() if check else done

    def sbatch(self, text: str, user: str, *options: str) -> int:
        """Submit a batch script from the user's home on the controller; the job id."""
        argv = ["sbatch", "--parsable", *options]
        return int(self.exec(CONTROLLER, argv, user=user, stdin=text).stdout.split(";")[0])

    def job(self, job_id: int) -> Job:
        """The job as `scontrol show job --json` has it; LabError when Slurm does not know it (any more)."""
        argv = ["scontrol", "show", "job", str(job_id), f"--json={DATA_PARSER}"]
        done = self.exec(CONTROLLER, argv, check=False)
        jobs = json.loads(done.stdout)["jobs"] if done.stdout.startswith("{") else []
        if not jobs:
            raise LabError(reason=f"job {job_id}: Slurm does not know it: {done.stderr.strip()}")
        job: Job = jobs[0]
        return job

    def is_over(self, job_id: int) -> bool:
        """Whether the job has ended and is not requeued. LabError as `job`."""
        return not _UNDER_WAY & set(self.job(job_id)["job_state"])

    def hostnames(self, nodes: str) -> list[str]:
        """The names that Slurm's short form (`n[1-3]`) stands for."""
        return self.exec(CONTROLLER, ["scontrol", "show", "hostnames", nodes]).stdout.split() if nodes else []

    def jobs(self) -> list[Job]:
        """All jobs that are not over."""
        done = self.exec(CONTROLLER, ["squeue", f"--json={DATA_PARSER}"])
        return [job for job in json.loads(done.stdout)["jobs"] if not _FINAL & set(job["job_state"])]

    def wait_job(self, job_id: int, wanted: str | Callable[[Job], bool], timeout_s: float = 60.0) -> Job:
        """Wait for a state (`RUNNING`) or for a predicate of the job; return the job then.

        LabError as soon as the job is over and is not what was waited for: it cannot become it any more.
        """
        what = f"to be {wanted}" if isinstance(wanted, str) else "to be as wanted"

        def matches(job: Job) -> bool:
            if not isinstance(wanted, str):
                return wanted(job)
            # A job that still ends is ["COMPLETED", "COMPLETING"]: over only when it is COMPLETED alone.
            states = set(job["job_state"])
            return wanted in states and (wanted == "COMPLETING" or "COMPLETING" not in states)

        def look() -> Job | None:
            job = self.job(job_id)
            if matches(job):
                return job
            if _FINAL & set(job["job_state"]) and "COMPLETING" not in job["job_state"]:
                code = job.get("exit_code", {}).get("return_code", {}).get("number")
                state = "+".join(job["job_state"])
                raise LabError(reason=f"job {job_id} is over ({state}, exit code {code}), wanted it {what}")
            return None

        job = wait_until(look, timeout_s, f"job {job_id} {what}")
        assert job is not None
        return job

    def cancel_all(self) -> None:
        """Cancel every job and wait until none is left."""
        ids = [str(job["job_id"]) for job in self.jobs()]
        if ids:
            self.exec(CONTROLLER, ["scancel", *ids], check=False)
        wait_until(lambda: not self.jobs(), 60, "the end of all jobs")
