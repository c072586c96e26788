"""`scripts/measure_network`: what the job's network costs, against the same two nodes without it.

A protected and an unprotected job run on the same two nodes and take turns: one round of the one, one of the other. So
both meet the same machine, whatever else it does. TCP segments are of one size in both: what fits into a frame of the
capsule's network, whose MTU is smaller by the tunnel's headers. TCP's congestion control is what jobs get, outside the
machine's, inside the configuration's; the report names both, since one that paces (bbr) sends at times of its own.

Both nodes are on one machine: the kernel does the work of every link, of both ends, in the sender's system calls, and
the receiver only adds a copy. So what the busier task (as a rule the sender) takes of its processor for a byte bounds
the throughput, and it tells the network's cost also while other programs run. A kernel that does not bill this work to
the task (CONFIG_IRQ_TIME_ACCOUNTING) shows a part of it only.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import network_pair, network_path
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES

_WARM_UP_ROUNDS = 2
_SEGMENT_BYTES = 1500 - 50 - 52  # Ethernet, less the tunnel, less IP and TCP with time stamps
_ROUND_LIMIT_S = 5
_SYSCTLS = Path("/proc/sys/net/ipv4")


def measure(lab: Lab, rounds: int, segment_bytes: int, congestion_control: str, size_bytes: int) -> dict[str, Any]:
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
            words = f"{rounds + _WARM_UP_ROUNDS} network-turn {me} {1 - me} {segment_bytes} {size_bytes}"
            words += f" {congestion_control}"
            script = f"#!/bin/bash\nsrun --ntasks=2 --nodes=2 python3 network_pair.py {words}\n"
            where = ["-w", nodes, "--nodes=2", "--ntasks-per-node=1", "--output=network-%j.out"]
            jobs.append(lab.sbatch(script, "alice", *where, *options))
        for job in jobs:
            lab.wait_job(job, "COMPLETED", timeout_s=60 + _ROUND_LIMIT_S * rounds)
        (outside, control), (inside, control_inside) = (read(home / f"network-{job}.out") for job in jobs)
    finally:
        turn.unlink()
    rates = [b[0] / a[0] for a, b in zip(outside, inside, strict=True)]
    bounds = [a[1] / b[1] for a, b in zip(outside, inside, strict=True)]
    added = [1e6 * (b[2] - a[2]) for a, b in zip(outside, inside, strict=True)]
    report: dict[str, Any] = {"type": "network", "rounds": len(rates), "segment_bytes": segment_bytes}
    report["size_bytes"] = size_bytes
    report["congestion_control"] = {"outside": control, "inside": control_inside}
    for place, found in (("outside", outside), ("inside", inside)):
        rate, used, trip = (statistics.median(values) for values in zip(*found, strict=True))
        report[f"{place}_bytes_per_s"] = round(rate)
        report[f"{place}_processor_ns_per_kib"] = round(1e9 * 1024 * used, 1)
        report[f"{place}_round_trip_us"] = round(1e6 * trip, 1)
    for name, values, digits in (("ratio", rates, 4), ("processor_ratio", bounds, 4), ("added_us", added, 1)):
        report[f"{name}_median"] = round(statistics.median(values), digits)
        report[f"{name}_interval"] = [round(value, digits) for value in interval(values)]
    return report


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds between which the median is in 95 of 100 such measurements, whatever the distribution (ranks of a
    binomial one, by its normal approximation)."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor((len(ordered) - 1) / 2 - reach))
    return ordered[low], ordered[len(ordered) - 1 - low]


def check_control(wanted: str, *, by_users: bool, sysctls: Path = _SYSCTLS) -> None:
    """Raise LabError unless TCP's congestion control `wanted` can be set here, by_users: also by a job's user."""
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())  # loads its module
    except OSError as error:
        there = (sysctls / "tcp_available_congestion_control").read_text().split()
        reason = f"this kernel cannot use the congestion control {wanted}: {error.strerror}"
        raise LabError(reason=f"{reason}; net.ipv4.tcp_available_congestion_control is {' '.join(there)}") from None
    allowed = (sysctls / "tcp_allowed_congestion_control").read_text().split()
    if by_users and wanted not in allowed:
        reason = f"only root may use the congestion control {wanted} here, and the measurement is a user's job"
        value = " ".join([*allowed, wanted])
        raise LabError(reason=f"{reason}: sysctl -w net.ipv4.tcp_allowed_congestion_control='{value}' allows it")


def read(output: Path) -> tuple[list[tuple[float, ...]], str]:
    """What each round measured (network_pair.measure), without the first ones, and TCP's congestion control. Raises
    LabError for a job that failed or was not protected."""
    text = output.read_text()
    lines = [line.split() for line in text.splitlines()]
    if "without protection" in text or ["END"] not in lines:
        raise LabError(reason=f"a job failed, or was not protected: {text[-500:]}")
    found = [tuple(map(float, words[1:])) for words in lines if words[:1] == ["ROUND"]]
    control = "".join(words[1] for words in lines if words[:1] == ["CONTROL"])
    return found[_WARM_UP_ROUNDS:], control


def main(args: Sequence[str] | None = None) -> int:
    """Measure on a lab that is up, or on one that is started for it."""
    parser = argparse.ArgumentParser(prog="measure_network", description="Cost of the job's network (root).")
    parser.add_argument("--rounds", type=int, default=200, help="pairs of rounds (200)")
    parser.add_argument("--segment-bytes", type=int, default=_SEGMENT_BYTES, help=f"of TCP ({_SEGMENT_BYTES})")
    parser.add_argument("--mib", type=int, default=32, help="of a transfer; short ones meet the same machine (32)")
    parser.add_argument("--congestion-control", default="", metavar="NAME", help="for both (one thread: reno)")
    parser.add_argument("--one-thread", action="store_true", help="the kernel's way alone, exactly (network_path)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(args)
    try:
        if options.congestion_control:
            check_control(options.congestion_control, by_users=not options.one_thread)
        with Lab().at_hand(2) as lab:
            words = (lab, max(4, options.rounds), options.segment_bytes, options.congestion_control)
            report = network_path.measure(*words) if options.one_thread else measure(*words, options.mib << 20)
    except GpucrError as error:
        print(f"measure_network: error: {error}", file=sys.stderr)
        return error.exit_code
    (network_path.tell if options.one_thread else tell)(report)
    if options.json:
        print(json.dumps(report))
    return 0


def tell(report: dict[str, Any]) -> None:
    """The report of `measure` in words."""
    outside, inside = (report[f"{where}_bytes_per_s"] / 1e9 for where in ("outside", "inside"))
    controls = report["congestion_control"]
    spent = [report[f"{where}_processor_ns_per_kib"] for where in ("outside", "inside")]

    def median(name: str) -> str:
        low, high = report[f"{name}_interval"]
        return f"{report[f'{name}_median']} (median of {report['rounds']} pairs, 95 % interval {low} to {high})"

    print(f"throughput: {outside:.2f} GB/s outside ({controls['outside']}), {inside:.2f} inside ({controls['inside']})")
    print(f"  inside / outside: {median('ratio')}")
    print(f"processor time of the busier task: {spent[0]} ns/KiB outside, {spent[1]} ns/KiB inside")
    print(f"  outside / inside: {median('processor_ratio')}")
    print(f"round trip: {report['outside_round_trip_us']} us outside, {report['inside_round_trip_us']} us inside")
    print(f"  added, us: {median('added_us')}")


if __name__ == "__main__":
    sys.exit(main())
