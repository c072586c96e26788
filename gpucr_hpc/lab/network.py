"""`scripts/measure_network`: what the job's network costs, against the same two nodes without it.

A protected and an unprotected job run on the same two nodes and take turns: one round of the one, one of the other. So
both meet the same machine, whatever else it does. TCP segments are of one size in both: what fits into a frame of the
capsule's network, whose MTU is smaller by the tunnel's headers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import network_pair
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES

_WARM_UP_ROUNDS = 2
_SEGMENT_BYTES = 1500 - 50 - 52  # Ethernet, less the tunnel, less IP and TCP with time stamps
_ROUND_LIMIT_S = 5


def measure(lab: Lab, rounds: int, segment_bytes: int) -> dict[str, Any]:
    """Throughput as a ratio inside / outside of the rounds' pairs, and the round trip's difference in microseconds."""
    home = lab.state / HOMES.lstrip("/") / "alice"
    shutil.copyfile(network_pair.__file__, home / "network_pair.py")
    turn = home / "network-turn"
    turn.write_bytes(b"0")
    turn.chmod(0o666)
    nodes = ",".join(lab.nodes()[1:3])
    jobs = []
    try:
        for me, options in ((0, []), (1, ["--checkpoint-on-preempt"])):
            words = f"{rounds + _WARM_UP_ROUNDS} network-turn {me} {1 - me} {segment_bytes}"
            script = f"#!/bin/bash\nsrun --ntasks=2 --nodes=2 python3 network_pair.py {words}\n"
            where = ["-w", nodes, "--nodes=2", "--ntasks-per-node=1", "--output=network-%j.out"]
            jobs.append(lab.sbatch(script, "alice", *where, *options))
        for job in jobs:
            lab.wait_job(job, "COMPLETED", timeout_s=60 + _ROUND_LIMIT_S * rounds)
        outside, inside = (read(home / f"network-{job}.out") for job in jobs)
    finally:
        turn.unlink()
    ratios = [b[0] / a[0] for a, b in zip(outside, inside, strict=True)]
    added = [1e6 * (b[1] - a[1]) for a, b in zip(outside, inside, strict=True)]
    return {
        "type": "network",
        "rounds": len(ratios),
        "segment_bytes": segment_bytes,
        "outside_bytes_per_s": round(statistics.median(a[0] for a in outside)),
        "inside_bytes_per_s": round(statistics.median(b[0] for b in inside)),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": _quartiles(ratios, 4),
        "outside_round_trip_us": round(1e6 * statistics.median(a[1] for a in outside), 1),
        "inside_round_trip_us": round(1e6 * statistics.median(b[1] for b in inside), 1),
        "added_us_median": round(statistics.median(added), 1),
        "added_us_quartiles": _quartiles(added, 1),
    }


def _quartiles(values: Sequence[float], digits: int) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4)
    return [round(low, digits), round(high, digits)]


def read(output: Path) -> list[tuple[float, float]]:
    """Bytes a second and seconds of a round trip of each round, without the first ones. Raises LabError for a job that
    failed or was not protected."""
    text = output.read_text()
    lines = [line.split() for line in text.splitlines()]
    if "without protection" in text or ["END"] not in lines:
        raise LabError(reason=f"a job failed, or was not protected: {text[-500:]}")
    found = [(float(words[1]), float(words[2])) for words in lines if words[:1] == ["ROUND"]]
    return found[_WARM_UP_ROUNDS:]


def main(args: Sequence[str] | None = None) -> int:
    """Measure on a lab that is up, or on one that is started for it."""
    parser = argparse.ArgumentParser(prog="measure_network", description="Cost of the job's network (root).")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of rounds (40)")
    parser.add_argument("--segment-bytes", type=int, default=_SEGMENT_BYTES, help=f"of TCP ({_SEGMENT_BYTES})")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(args)
    try:
        with Lab().at_hand(2) as lab:
            report = measure(lab, max(4, options.rounds), options.segment_bytes)
    except GpucrError as error:
        print(f"measure_network: error: {error}", file=sys.stderr)
        return error.exit_code
    outside, inside = (report[f"{where}_bytes_per_s"] / 1e9 for where in ("outside", "inside"))
    low, high = report["ratio_quartiles"]
    print(f"throughput: {outside:.2f} GB/s outside, {inside:.2f} GB/s inside a capsule")
    print(f"  inside / outside: {report['ratio_median']:.3f} (median; quartiles {low:.3f} and {high:.3f})")
    print(f"round trip: {report['outside_round_trip_us']} us outside, {report['inside_round_trip_us']} us inside")
    print(f"  added: {report['added_us_median']} us (median)")
    if options.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
