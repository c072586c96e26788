"""`scripts/measure_overhead`: what the capsule costs a job that only computes, as a ratio of run times.

Two jobs run the same program on one node and one processor, one with --checkpoint-on-preempt and one without. They
take turns: a round of the one (about 30 ms), then the same round of the other. So both meet the same machine, whatever
else it does, and the median of the pairs' ratios is good even where run times vary by half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab.cluster import Lab

# The first byte of the shared file says whose turn it is.
_PROGRAM = """#!/usr/bin/python3
import os, time
def work(count):
    value = 1
    for number in range(count):
        value = (value * 6364136223846793005 + number) & 0xFFFFFFFFFFFFFFFF
    return value
os.sched_setaffinity(0, {{os.cpu_count() - 1}})  # processors of one machine may differ by more than what is measured
turn, times = os.open("overhead-turn", os.O_RDWR), []
for _ in range({rounds}):
    while os.pread(turn, 1, 0) != b"{me}":
        time.sleep(0.002)
    start = time.perf_counter()
    work(200_000)
    times.append(time.perf_counter() - start)
    os.pwrite(turn, b"{other}", 0)
print("TIMES", *times, flush=True)
"""
_WARM_UP_ROUNDS = 10


def measure(lab: Lab, rounds: int) -> dict[str, object]:
    """Ratios protected / unprotected of `rounds` pairs of rounds."""
    home = lab.state / "shared/home/alice"
    turn = home / "overhead-turn"
    turn.write_bytes(b"0")
    turn.chmod(0o666)
    try:
        jobs = []
        for me, options in ((0, []), (1, ["--checkpoint-on-preempt"])):
            program = _PROGRAM.format(rounds=rounds + _WARM_UP_ROUNDS, me=me, other=1 - me)
            where = ["-w", lab.nodes()[1], "--output", "overhead-%j.out"]
            jobs.append(lab.sbatch(program, "alice", *where, *options))
        for job in jobs:
            lab.wait_job(job, "COMPLETED", timeout_s=rounds + 120)
        plain, protected = (_times(home / f"overhead-{job}.out") for job in jobs)
    finally:
        turn.unlink()
    ratios = sorted(b / a for a, b in zip(plain, protected, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "type": "overhead",
        "pairs": len(ratios),
        "round_s": round(statistics.median(plain), 5),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
    }


def _times(output: Path) -> list[float]:
    text = output.read_text()
    output.unlink()
    if "without protection" in text or "TIMES" not in text:
        raise LabError(reason=f"a job was not protected, or failed: {text[-500:]}")
    line = next(line for line in text.splitlines() if line.startswith("TIMES"))
    return [float(word) for word in line.split()[1 + _WARM_UP_ROUNDS :]]


def main(args: Sequence[str] | None = None) -> int:
    """Measure on a lab that is up, or on one that is started for it."""
    parser = argparse.ArgumentParser(prog="measure_overhead", description="Cost of the capsule, as a ratio (root).")
    parser.add_argument("--rounds", type=int, default=500, help="pairs of rounds, about 0.08 s each (500)")
    options = parser.parse_args(args)
    try:
        with Lab(say=lambda line: print(line, flush=True)).at_hand(2) as lab:
            report = measure(lab, max(10, options.rounds))
    except GpucrError as error:
        print(f"measure_overhead: error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
