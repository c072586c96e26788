"""--checkpoint-files: what a restore from an older checkpoint does about files that grew after it."""

from __future__ import annotations

import shutil

from jobs import JobRun, bench

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

WRITER = """
    exec 3>>own.txt
    for ((i = 1; ; i++)); do
        echo "own $i" >&3
        echo "line $i"
        [ -e stop ] && break
        sleep 0.1
    done
"""


def back_to_the_first_of_two(lab: Lab, policy: str) -> tuple[JobRun, int]:
    """A job with a set taken at some line, a later one with which it stopped, and which is lost; how many lines its own
    file had at its stop."""
    at = bench(lab, f"files-{policy}")
    job = at.submit(WRITER, f"--checkpoint-files={policy}", name="job").says("line 3\n")
    job.checkpoint()
    job.says(f"line {len(job.out.splitlines()) + 5}\n")
    lost = job.checkpoint("--stop")["checkpoint"]
    lab.wait_job(job.id, lambda info: info["job_state"] == ["PENDING"], 60)
    assert job.info["hold"] or job.info["priority"]["number"] == 0
    shutil.rmtree(job.store() / lost)
    lines = len(job.file("own.txt").splitlines())
    lab.exec("ctl", ["scontrol", "release", str(job.id)], user=job.user)
    return job, lines


def test_keep(lab: Lab) -> None:
    """What was written after the checkpoint stays, and what is written again comes behind it."""
    job, lines = back_to_the_first_of_two(lab, "keep")
    job.back(1)
    wait_until(lambda: len(job.file("own.txt").splitlines()) > lines + 5, 20, "more lines")
    (job.directory / "stop").touch()
    job.end()
    numbers = [int(line.split()[1]) for line in job.file("own.txt").splitlines()]
    assert numbers[:lines] == list(range(1, lines + 1))
    again = numbers[lines]
    assert again <= lines
    assert numbers[lines:] == list(range(again, again + len(numbers) - lines))
    assert list(job.directory.glob("*.after-*")) == []


def test_refuse(lab: Lab) -> None:
    """The job is held, the file named, and nothing of it changed."""
    job, lines = back_to_the_first_of_two(lab, "refuse")
    job.says("own.txt grew by")
    lab.wait_job(job.id, lambda info: info["job_state"] == ["PENDING"], 60)
    assert "The job is held" in job.raw
    assert len(job.file("own.txt").splitlines()) == lines
    assert list(job.directory.glob("*.after-*")) == []
    job.cancel()


_TOGETHER = """
import os, threading

def write():
    rank, log, own = os.environ["SLURM_PROCID"], open("shared.log", "ab", buffering=0), 0
    while not os.path.exists("stop"):
        log.write(b"%s %d %s\\n" % (rank.encode(), own, b"x" * 200))
        own += 1
    ended.set()

ended = threading.Event()
if os.environ["SLURM_PROCID"] == "1":  # is frozen thread by thread, the one that writes last of all
    for _ in range(1500):
        threading.Thread(target=ended.wait, daemon=True).start()
threading.Thread(target=write).start()
print("ready", flush=True)
"""


def test_a_file_to_which_two_nodes_write_at_full_rate(lab: Lab) -> None:
    """They freeze one after the other, so each sees another size of it. Each line is there once, after moves and after
    a restore from an older set."""
    at = bench(lab, "files-shared")
    script = f"srun python3 {at.put('together.py', _TOGETHER)}"
    job = at.submit(script, "--nodes=2", "--ntasks-per-node=1", name="job")
    wait_until(lambda: job.out.count("ready\n") == 2, 60, lambda: f"two ranks:\n{job.raw}")
    job.move()
    job.checkpoint()
    seen = (at.directory / "shared.log").stat().st_size
    wait_until(lambda: (at.directory / "shared.log").stat().st_size > seen + 100_000, 20, "more lines")
    lost = job.checkpoint("--stop")["checkpoint"]
    lab.wait_job(job.id, lambda info: info["job_state"] == ["PENDING"], 60)
    shutil.rmtree(job.store() / lost)
    lab.exec("ctl", ["scontrol", "release", str(job.id)], user=job.user)
    job.back(2)
    job.move()
    (at.directory / "stop").touch()
    job.end()
    lines = [line.split() for line in job.file("shared.log").splitlines()]
    for rank in ("0", "1"):
        numbers = [int(line[1]) for line in lines if line[0] == rank]
        assert numbers == list(range(len(numbers)))
    assert {len(line[2]) for line in lines} == {200}
