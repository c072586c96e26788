"""Checkpoint on demand, by the clock and at the time limit, drain and node failure: under a TaskProlog, in an array,
while agents die.

A choice of the cases in every run, each with each by GPUCR_TEST_LONG=1. And what the commands that watch a job say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from jobs import LONG, JobRun, bench, configured, each, kill_agent, under
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

_CLOCK = re.compile(r"gpucr: checkpoint \S+ written in ")


@contextmanager
def job_of(lab: Lab, way: str, name: str, options: Sequence[str] = ()) -> Iterator[JobRun]:
    """A job that counts, with a checkpoint every 4 s, under a TaskProlog or as an element of an array."""
    at = bench(lab, name)
    script = count("job").replace("#!/bin/bash\n", '#!/bin/bash\necho "site $SITE $SLURM_ARRAY_TASK_ID"\n')
    with under(at, way) as words:
        yield at.submit(script, "--checkpoint-interval=4s", *options, *words, name="job").says("line 2\n")


def order(job: JobRun, _kill: bool) -> None:
    """Taken as soon as none by the clock is under way and an agent is there."""
    job.says("line 5\n")
    wait_until(lambda: job.gpucr("checkpoint", str(job.id), check=False).status == 0, 60, "a checkpoint on demand")


def clock(job: JobRun, _kill: bool) -> None:
    """One that begins from now on; what a killed agent had begun leaves no trace."""
    before = len(_CLOCK.findall(job.raw))
    wait_until(lambda: len(_CLOCK.findall(job.raw)) > before + 1, 60, "two checkpoints by the clock")


def drain(job: JobRun, kill: bool) -> None:
    """The job leaves its node, also when the agent there is killed under the command."""
    node = job.node
    other = next(name for name in job.lab.nodes()[1:] if name != node)
    argv = ["gpucr", "drain", node, "--reason", "test", "--deadline", "60s"]
    orders = [lambda: job.lab.exec(other, argv, timeout_s=100)]
    each([*orders, lambda: kill_agent(job.lab, node)] if kill else orders)
    wait_until(lambda: job.info["job_state"] == ["RUNNING"] and job.node != node, 60, "the job on another node")
    job.lab.exec(other, ["gpucr", "undrain", node])
    seen = len(job.out)
    wait_until(lambda: len(job.out) > seen, 60, "the job to go on")


def failure(job: JobRun, kill: bool) -> None:
    """The node is off; agents of the others are killed while they restore."""
    wait_until(lambda: job.sets(), 30, "a checkpoint")
    node, restarts = job.node, job.restarts
    job.lab.kill(node)
    job.running(restarts + 1, timeout_s=200)
    if kill:
        kill_agent(job.lab, job.node)
    assert job.node != node
    seen = len(job.out)
    wait_until(lambda: len(job.out) > seen, 90, "the job to go on")
    job.lab.start(node)


def limit(job: JobRun, kill: bool) -> None:
    """It goes on with a new time limit, also when agents are killed before and after it leaves."""
    wait_until(lambda: job.out.count("\n") > 200, 40, "the time limit to come near")
    if kill:
        kill_agent(job.lab, job.node)
    job.running(1, timeout_s=90)
    if kill:
        kill_agent(job.lab, job.node)
    job.back(1)
    seen = len(job.out)
    wait_until(lambda: len(job.out) > seen, 60, "the job to go on")


WORK = {"order": order, "clock": clock, "drain": drain, "failure": failure, "limit": limit}
CASES = (
    [(way, [name]) for way in ("prolog", "array", "agent") for name in WORK]
    if LONG
    else [("prolog", ["clock", "drain"]), ("array", ["order", "failure"]), ("agent", ["order", "drain"])]
)


@pytest.mark.parametrize(("way", "work"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_operation(lab: Lab, way: str, work: list[str]) -> None:
    """Every line of the output is there once and in order, and the environment is that of the start."""
    options = ("--checkpoint-on-timeout", "--time=1") if "limit" in work else ()
    with job_of(lab, way, f"ops-{way}-{'-'.join(work)}", options) as job:
        for name in work:
            if way == "agent":
                kill_agent(lab, job.node)
            WORK[name](job, way == "agent")
        (job.directory / "job.stop").touch()
        job.end(3)
    first, *lines = job.out.splitlines()
    assert first == {"prolog": "site blue ", "array": "site  7", "agent": "site  "}[way]
    assert lines == [*(f"line {n}" for n in range(1, len(lines))), f"the last of {len(lines) - 1} lines"]


def test_element_of_an_array_by_its_name(lab: Lab) -> None:
    """As squeue shows it, at any node; one that there is not is named as it was asked for."""
    job = bench(lab, "ops-element").submit(count("job"), "--array=3,5", name="job").says("line 1\n")
    shown = lab.exec("ctl", ["squeue", "--noheader", "-j", f"{job.id}_3,{job.id}_5", "-o", "%A %K"]).stdout
    for line in shown.splitlines():
        number, task = line.split()
        name = f"{job.id}_{task}"
        (table,) = json.loads(job.gpucr("status", name, "--json", node="n1").stdout)["jobs"]
        assert table["job"] == number
        wait_until(lambda name=name: job.gpucr("checkpoint", name, check=False).status == 0, 30, "a checkpoint")
        listed = job.gpucr("list", name, "--no-header").stdout.splitlines()
        assert {number} == {row.split()[0] for row in listed}
    assert len(shown.splitlines()) == 2
    missing = job.gpucr("checkpoint", f"{job.id}_9", check=False)
    assert (missing.status, f"job {job.id}_9: Slurm does not know" in missing.stderr) == (21, True)
    job.cancel()


def test_what_is_said_of_a_job(lab: Lab) -> None:
    """`gpucr top`, `gpucr advise` and the agent's figures name the job and its last checkpoint."""
    with configured(lab, "metrics_port = 9469", ["n1"]):
        script = 'echo "25 100 30" >$GPUCR_PROGRESS; ' + count("job").removeprefix("#!/bin/bash\n")
        job = bench(lab, "ops-said").submit(script, "-w", "n1", "--checkpoint-interval=1h", name="job").says("line 1\n")
        early = job.gpucr("advise", str(job.id), check=False)
        assert (early.status, "has had no checkpoint yet" in early.stderr) == (2, True)
        report = job.checkpoint()
        advice = json.loads(job.gpucr("advise", str(job.id), "--node-mtbf", "30d", "--json").stdout)
        assert advice["cost_s"] == report["freeze_s"]
        assert 0 < advice["loss"] < 0.01
        assert (advice["interval_s"], advice["configured_interval_s"]) == (pytest.approx(
            (2 * report["freeze_s"] * 30 * 86400) ** 0.5, rel=0.05), 3600)  # fmt: skip
        top = lab.exec("n2", ["timeout", "6", "gpucr", "top", "--interval", "1"], user=job.user, check=False)
        (line, *_) = [line for line in top.stdout.splitlines() if line.split()[:2] == [str(job.id), job.user]]
        assert {"n1", "running", report["checkpoint"], "25"} <= set(line.split())
        ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9469/metrics').read().decode())"
        figures = dict(
            text.rsplit(" ", 1)
            for text in lab.exec("n1", ["python3", "-c", ask], user=job.user).stdout.splitlines()
            if text and not text.startswith("#")
        )
        assert figures['gpucr_checkpoints_total{reason="demand",result="good"}'] == "1"
        assert float(figures["gpucr_checkpoint_bytes_total"]) == report["bytes_stored"]
        assert float(figures["gpucr_freeze_seconds_total"]) == pytest.approx(report["freeze_s"])
        assert figures['gpucr_jobs{phase="running"}'] == "1"
        last = figures[f'gpucr_last_checkpoint_timestamp_seconds{{job="{job.id}"}}']
        assert float(last) == pytest.approx(report["began"], abs=1)
        job.whole()
