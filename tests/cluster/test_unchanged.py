"""Checkpoints that refer to earlier ones, taken by agents: small, quick, whole after the earlier ones are gone."""

from __future__ import annotations

from jobs import bench

from gpucr_hpc.lab.cluster import Lab

# 64 MiB that never change, a heap that grows, and a line a round; the memory is compared at the end.
PROGRAM = """
import hashlib, os, sys, time
big = os.urandom(64 << 20)
want, grown = hashlib.sha256(big).hexdigest(), []
number = 0
while not os.path.exists("stop"):
    number += 1
    grown.append(os.urandom(5000))
    print("round", number, flush=True)
    time.sleep(0.1)
print("memory is", "right" if hashlib.sha256(big).hexdigest() == want and len(grown) == number else "wrong")
"""


def test_a_second_checkpoint_stores_what_changed_and_outlives_the_first(lab: Lab) -> None:
    """Of 64 MiB that stay the same nothing is stored again; the job is restored from references, also when the
    checkpoint that was written in full has been removed; --full refers to nothing."""
    on = bench(lab, "references")
    on.put("program.py", PROGRAM)
    job = on.submit("python3 program.py; exit 4", name="job").says("round 3\n")
    first = job.checkpoint()
    assert first["bytes_stored"] > 64 << 20
    later = [job.checkpoint() for _ in range(3)]  # the store keeps two, so the first one goes
    for report in later:
        assert report["bytes_stored"] < 16 << 20
    listed = job.gpucr("list", str(job.id)).stdout
    assert first["checkpoint"] not in listed
    assert later[-1]["checkpoint"] in listed
    job.gpucr("verify", later[-1]["checkpoint"], "--deep")
    job.move()
    assert job.checkpoint("--full")["bytes_stored"] > 64 << 20
    job.move()
    (job.directory / "stop").touch()
    job.end(4)
    assert "memory is right\n" in job.out
    rounds = job.out.count("round ")
    assert [f"round {n}" for n in range(1, rounds + 1)] == job.out.splitlines()[:-1]
