"""`scripts/measure_barrier`: what it costs that all nodes of a job are checkpointed as one.

Two measurements. On the lab: checkpoints of a real job of 4 nodes; their wall time (the lead's phases from the first
word to the commit) against the slowest node's own work (the same phases as that node's agent timed them, without its
waiting for others). And simulated agents: the real protocol for up to 1,000 nodes with no work behind it, so that all
its time is overhead (lab/simulated_agents).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES
from gpucr_hpc.lab.demo.events import Event, Events
from gpucr_hpc.lab.wait import wait_until

_NODES = 4
_SIZES = (2, 10, 100, 300, 1000)
# An agent's line: what its node did itself.
_OWN = ("make_ready", "join", "gpu_lock", "lock", "capture", "resume", "seal")
_WALL = ("prepare", "gpu_lock", "lock", "capture", "resume", "seal", "commit")  # the lead's phases, waiting included
_LIMIT_S = 60.0

# A rank whose memory does not compress, and which tells when it is there.
_PROGRAM = """#!/usr/bin/python3
import os, sys, time
memory = bytearray(os.urandom(1 << 20)) * {megabytes}
print("rank", os.environ["SLURM_PROCID"], "is there", flush=True)
count = 0
while not os.path.exists("barrier.stop"):
    count += 1
    memory[count % len(memory)] = count & 255
    time.sleep(0.01)
"""


def real(lab: Lab, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    """Checkpoints of one job of 4 nodes that runs on after each: seconds and their ratio."""
    home = lab.state / HOMES.lstrip("/") / "alice"
    (home / "barrier.py").write_text(_PROGRAM.format(megabytes=megabytes))
    stop = home / "barrier.stop"
    stop.unlink(missing_ok=True)
    script = "#!/bin/bash\nsrun python3 barrier.py\n"
    options = ["--checkpoint-on-preempt", f"--nodes={_NODES}", "--ntasks-per-node=1", "--output=barrier-%j.out"]
    events = Events(lab)
    job = lab.sbatch(script, "alice", *options)
    output = home / f"barrier-{job}.out"
    try:
        there = f"all ranks of job {job}"
        wait_until(lambda: output.exists() and output.read_text().count("is there") == _NODES, _LIMIT_S, there)
        lead = lab.hostnames(lab.job(job)["nodes"])[0]
        return [_round(lab, job, lead, events) for _ in range(rounds)]
    finally:
        stop.touch()
        lab.wait_job(job, "COMPLETED")


def _round(lab: Lab, job: int, lead: str, events: Events) -> dict[str, Any]:
    start = time.monotonic()
    done = lab.exec(lead, ["gpucr", "checkpoint", str(job), "--json"], user="alice", timeout_s=_LIMIT_S)
    report = json.loads(done.stdout)
    events.poll(job)
    own = [e for e in events.seen if e.text == "image written" and e.fields["checkpoint"] == report["checkpoint"]]
    if len(own) != _NODES:
        raise LabError(reason=f"{len(own)} agents wrote of checkpoint {report['checkpoint']}, not {_NODES}")
    return compare(report["phases_s"], own) | {"command_s": round(time.monotonic() - start, 3)}


def compare(phases_s: dict[str, float], own: Sequence[Event]) -> dict[str, Any]:
    """Wall time of a checkpoint against the slowest node's own work. phases_s: the lead's; own: the nodes' lines."""
    wall_s = sum(phases_s[phase] for phase in _WALL)
    slowest = max(own, key=lambda event: _own_s(event))
    return {
        "wall_s": round(wall_s, 4),
        "slowest_own_s": round(_own_s(slowest), 4),
        "slowest_node": slowest.node,
        "ratio": round(wall_s / _own_s(slowest), 4),
        "phases_s": {phase: phases_s[phase] for phase in _WALL},
        "slowest_phases_s": {phase: float(slowest.fields.get(phase, 0)) for phase in _OWN},
    }


def _own_s(event: Event) -> float:
    return sum(float(event.fields.get(phase, 0)) for phase in _OWN)


def simulated(lab: Lab, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The protocol alone, for jobs of so many nodes, by the Python of a node."""
    found = []
    for nodes in sizes:
        argv = ["python3", "-m", "gpucr_hpc.lab.simulated_agents", str(nodes)]
        found.append(json.loads(lab.exec(lab.nodes()[1], argv, timeout_s=300).stdout))
    return found


def _print_real(rounds: Sequence[dict[str, Any]]) -> None:
    print(f"{'round':>5} {'wall s':>8} {'slowest node s':>15} {'ratio':>6}")
    for number, one in enumerate(rounds, 1):
        slowest = f"{one['slowest_own_s']:.3f} ({one['slowest_node']})"
        print(f"{number:5} {one['wall_s']:8.3f} {slowest:>15} {one['ratio']:6.3f}")


def _print_curve(curve: Sequence[dict[str, Any]]) -> None:
    print(f"{'nodes':>5} {'overhead s':>10} {'ms a node':>9} {'requests':>8} {'lead KiB':>8} {'lead CPU s':>10}")
    for one in curve:
        each_ms = 1000 * one["overhead_s"] / one["nodes"]
        print(
            f"{one['nodes']:5} {one['overhead_s']:10.3f} {each_ms:9.2f} {one['requests']:8} "
            f"{one['lead_memory_kib']:8} {one['lead_cpu_s']:10.3f}"
        )


def main(args: Sequence[str] | None = None) -> int:
    """Measure on a lab that is up, or on one that is started for it."""
    parser = argparse.ArgumentParser(prog="measure_barrier", description="Cost of the barrier between nodes (root).")
    parser.add_argument("--rounds", type=int, default=8, help="checkpoints of the real job (8)")
    parser.add_argument("--megabytes", type=int, default=64, help="memory of each node's task (64)")
    parser.add_argument("--simulate", type=int, nargs="*", default=_SIZES, metavar="NODES", help="sizes, or none")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(args)
    try:
        with Lab().at_hand(_NODES) as lab:
            curve = simulated(lab, options.simulate)
            _print_curve(curve)
            rounds = real(lab, max(1, options.rounds), options.megabytes)
            _print_real(rounds)
    except GpucrError as error:
        print(f"measure_barrier: error: {error}", file=sys.stderr)
        return error.exit_code
    ratio = round(statistics.median(one["ratio"] for one in rounds), 4)
    print(f"a checkpoint of {_NODES} nodes takes {ratio:.3f} times the slowest node's own work (median)")
    if options.json:
        report = {"type": "barrier", "ratio_median": ratio, "megabytes": options.megabytes}
        print(json.dumps(report | {"rounds": rounds, "simulated": curve}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
