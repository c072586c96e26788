"""A checkpoint after which the job goes on: it does so as soon as its memory is read, and what comes then harms neither
the job nor its checkpoints."""

from __future__ import annotations

import re

import pytest
from jobs import Bench, JobRun, agent_back, arm, bench, configured, disarm, fired, stopped_at, take
from programs import count

from gpucr_hpc.faults import Point
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

EVERY = "--checkpoint-interval=2s"

# Adds one to a word of every page, again and again, and knows what must be there: a page that is in the image as it was
# a moment later, or earlier, is noticed at once.
SWEEP = """#!/usr/bin/python3
import mmap, os
PAGES = {pages}
memory = mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
words = memoryview(memory).cast("Q")
noise = os.urandom(4096 - 64)
for page in range(PAGES):
    memory[page * 4096 + 64 : (page + 1) * 4096] = noise
turn = 0
while not os.path.exists("{name}.stop"):
    turn += 1
    for page in range(PAGES):
        words[page * 512] += 1
        assert words[page * 512] == turn, (page, words[page * 512], turn)
    if turn % 50 == 1:
        print("turn", turn, flush=True)
print("all pages are right", flush=True)
"""


@pytest.fixture
def on(lab: Lab) -> Bench:
    return bench(lab, "runs-on")


def sealing(job: JobRun) -> None:
    """Wait until a checkpoint of the job stands between resume and seal."""
    stopped_at(job, job.node)
    assert "sealing" in job.gpucr("status", str(job.id)).stdout


def goes_on(job: JobRun) -> None:
    """Its tasks run: there are more lines than before."""
    lines = len(job.out.splitlines())
    wait_until(lambda: len(job.out.splitlines()) > lines + 3, 20, f"more lines of job {job.id}")


def held(on: Bench, name: str) -> JobRun:
    """A job that runs on while its checkpoint waits to be sealed."""
    job = on.submit(count(name), EVERY, name=name)
    arm(job, Point.RESUMED, "stop", nodes=on.lab.nodes()[1:])
    job.says("line 1\n")
    sealing(job)
    goes_on(job)
    return job


def test_the_image_is_of_the_moment_of_the_cut(lab: Lab, on: Bench) -> None:
    """The job writes to all of its memory while it is sealed; after the loss of its node every page is as it was."""
    on.put("sweep.py", SWEEP.format(pages=40000, name="sweep"))
    job = on.submit("exec python3 sweep.py", EVERY, name="sweep").says("turn 1\n")
    wait_until(lambda: len(re.findall("checkpoint .* written", job.raw)) >= 3, 60, "three checkpoints")
    lab.kill(job.node)
    job.running(1, timeout_s=200).says("gpucr: restored on", timeout_s=30)
    at = job.raw.rindex("gpucr: restored on")
    wait_until(lambda: "turn" in job.raw[at:], 60, "a turn after the restore")
    (on.directory / "sweep.stop").touch()
    job.end()
    assert "all pages are right" in job.out


def test_preempted_while_it_is_sealed(lab: Lab, on: Bench) -> None:
    """The checkpoint under way is given up for the one with which the job leaves; no line is lost."""
    job = held(on, "preempted")
    node = job.node
    high = take(lab, node)
    job.back(1)
    assert job.node != node
    lab.exec("ctl", ["scancel", str(high)])
    job.whole()


def test_ends_while_it_is_sealed(on: Bench) -> None:
    """Its end is Slurm's at once, and of its checkpoints nothing is left."""
    job = on.submit(count("ends", code=0), EVERY, name="ends")
    arm(job, Point.RESUMED, "stop", nodes=on.lab.nodes()[1:])
    job.says("line 1\n")
    sealing(job)
    node = job.node
    job.whole(0)
    disarm(job)
    wait_until(lambda: not directories(job), 20, f"an empty store:\n{directories(job)}")
    ended(on.lab, job, node)


def test_cancelled_while_it_is_sealed(on: Bench) -> None:
    """Nothing of the job stays on the node until the image is written."""
    job = held(on, "cancelled")
    node = job.node
    job.cancel()
    ended(on.lab, job, node)
    assert directories(job) == job.sets(), "a part of a checkpoint is left"


def directories(job: JobRun) -> list[str]:
    """Whatever the store has of checkpoints of the job, whole or not."""
    return sorted(path.name for path in job.store().iterdir() if path.is_dir())


def ended(lab: Lab, job: JobRun, node: str) -> None:
    """The capsule and everything of the job is gone from the node."""
    directory = lab.root(node) / f"run/gpucr/jobs/{job.id}"
    wait_until(lambda: not directory.exists(), 20, f"the end of job {job.id} on {node}")


@pytest.mark.parametrize("action", ["kill", "fail"])
def test_a_failure_while_it_is_sealed(on: Bench, action: str) -> None:
    """The agent dies, or the image cannot be written: the job does not notice, and the next checkpoint is taken."""
    job = on.submit(count(action), EVERY, name=action)
    arm(job, Point.RESUMED, action, nodes=on.lab.nodes()[1:])
    job.says("line 1\n")
    fired(job, job.node)
    agent_back(on.lab, job.node)
    goes_on(job)
    disarm(job)
    job.says("stood still for", timeout_s=90)
    assert ("the job runs on: unexpected error: fault point" in job.raw) == (action == "fail")
    assert len(job.sets()) in (1, 2)
    job.move()
    job.whole()


def test_without_room(lab: Lab, on: Bench) -> None:
    """What finds no room in memory is sealed while the job stands still."""
    with configured(lab, "[engine]\nroom_percent = 0"):
        on.put("big.py", SWEEP.format(pages=40000, name="big"))
        job = on.submit("exec python3 big.py", name="big").says("turn 1\n")
        report = job.checkpoint()
        assert report["freeze_s"] >= 0.5 * report["dump_s"]
        job.move()
        (on.directory / "big.stop").touch()
        job.end()
    assert "all pages are right" in job.out
