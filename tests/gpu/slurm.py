"""PyTorch DDP under Slurm on a GPU machine: submitted with sbatch, preempted, restored on another node of the lab.

The lab's nodes share the machine's cards; Slurm gives each job all of its node. Run by scripts/gpu_slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpucr_hpc.errors import GpucrError
from gpucr_hpc.lab import gpus
from gpucr_hpc.lab.cluster import Lab

ROOT = Path(__file__).resolve().parents[2]
USER = "alice"
_SCRIPT = """#!/bin/bash
export PYTHONHOME=/host{home} PYTHONPATH=/host{site}
for rank in $(seq 0 $(($2 - 1))); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \\
        {loader} /host{python} pytorch_train.py --log $1-$rank.log --steps {steps} --pause 0.1 >>$1-$rank.txt 2>&1 &
done
wait
"""


class Failed(Exception):
    """What did not come about."""


def script(steps: int) -> str:
    """The batch script; the Python of this program is the host's, and the nodes have it below /host."""
    python = Path(sys.executable).resolve()
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__path__[0])"], capture_output=True, text=True, check=True
    )
    site = Path(found.stdout.strip()).parent
    for path in (python, site):
        if not any(path.is_relative_to(directory) for directory in gpus.HOST_DIRECTORIES):
            raise Failed(f"the nodes do not see {path}")
    loader = " ".join(gpus.HOST_LOADER)
    return _SCRIPT.format(home=python.parent.parent, site=site, loader=loader, python=python, steps=steps)


class Bench:
    """The lab and the user's home in it."""

    def __init__(self, lab: Lab, cards: int, nccl: str, began: float) -> None:
        self.lab, self.cards, self.nccl, self.began = lab, cards, nccl, began
        self.home = lab.state / "shared/home" / USER

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def submit(self, name: str, *options: str) -> str:
        common = [f"--gres=gpu:{self.cards}", "--nodes=1", "--cpus-per-task=4", f"--output={name}.out", "--parsable"]
        done = self.lab.exec("ctl", ["sbatch", *common, *options], user=USER)
        self.say(f"{name}: job {done.stdout.strip()}")
        return done.stdout.strip()

    def protected(self, name: str, *options: str) -> str:
        protection = ("--checkpoint-on-preempt", f"--checkpoint-nccl={self.nccl}", "--partition=low", "--mem=12G")
        return self.submit(name, *protection, *options, "train.sh", name, str(self.cards))

    def text(self, name: str) -> str:
        path = self.home / name
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self, name: str) -> list[list[str]]:
        return [self.text(f"{name}-{rank}.log").splitlines() for rank in range(self.cards)]

    def until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise Failed(f"not within {limit_s:.0f} s: {what}")
            time.sleep(0.1)
        self.say(what)

    def evidence(self) -> None:
        """What the daemons and the job have said, for a failure."""
        done = self.lab.exec("ctl", ["bash", "-c", "squeue; sinfo -Nl; scontrol show job"], check=False)
        print(done.stdout[-3500:])
        asked = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv"]
        done = self.lab.exec(self.lab.nodes()[1], asked, check=False)
        print(done.stdout[-500:], done.stderr[-500:])
        for path in sorted(self.home.glob("*.out")) + sorted(self.home.glob("*.txt")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-1200:]}")
        for node in self.lab.nodes():
            logs = self.lab.state / "nodes" / node / "upper/var/log"
            for path in (logs / "agent.log", logs / "slurmd.log", *sorted(logs.glob("gpucr/*"))):
                if path.is_file():
                    print(f"--- {node} {path.name}\n{path.read_text(errors='replace')[-4000:]}")


def move(bench: Bench, steps: int) -> dict[str, object]:
    """The case: the job that was preempted has the logs of one that was left alone."""
    shutil.copy(ROOT / "examples/pytorch_train.py", bench.home)
    (bench.home / "train.sh").write_text(script(steps))
    bench.protected("job")
    bench.until(lambda: min(map(len, bench.logs("job"))) >= 10, 90, "every rank trains")
    first = bench.lab.exec("ctl", ["squeue", "-h", "-n", "train.sh", "-o", "%N"]).stdout.strip()
    # One node is left alone, the other is taken away for good: the job can come back on the third only.
    other, third = (name for name in bench.lab.nodes()[1:] if name != first)
    bench.protected("plain", f"--nodelist={other}")
    bench.submit("high", "--partition=high", "--exclusive", f"--nodelist={first}", "--mem=1G", "--wrap", "sleep 600")
    bench.until(lambda: "the job leaves" in bench.text("job.out"), 60, "checkpoint")
    bench.until(lambda: all(log[-1:] == ["passed"] for log in bench.logs("plain")), 120, "undisturbed job has passed")
    bench.until(lambda: f"restored on {third}" in bench.text("job.out"), 60, f"restore on {third}")
    bench.until(lambda: all(log[-1:] == ["passed"] for log in bench.logs("job")), 120, "preempted job has passed")
    if bench.logs("job") != bench.logs("plain"):
        raise Failed("the losses differ from the undisturbed job's")
    said = bench.text("job.out").splitlines()
    return {"from": first, "to": third, "said": said, "steps": len(bench.logs("job")[0]) - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--nccl", choices=("safe", "rebuild"), default="safe", help="what --checkpoint-nccl gets")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more for slurm.conf")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    began = time.monotonic()
    cards = sum(1 for name in gpus.devices() if name.removeprefix("nvidia").isdigit())
    if not cards:
        print("gpu_slurm: error: this machine has no NVIDIA card", file=sys.stderr)
        return 1
    lab = Lab(say=lambda line: print(f"lab: {line}", flush=True))
    bench = Bench(lab, cards, args.nccl, began)
    result: dict[str, object] = {"result": "FAILED", "cards": cards}
    try:
        settings = ["GresTypes=gpu", f"node.Gres=gpu:{cards}", f"node.CPUs={os.cpu_count()}", *args.set]
        lab.up(3, settings, fresh=True)
        result |= move(bench, args.steps)
        doctor = lab.exec(lab.nodes()[1], ["gpucr", "doctor"], check=False)
        print(doctor.stdout, doctor.stderr)
        result["result"] = "ok"
    except (Failed, GpucrError) as error:
        result["why"] = str(error)
        bench.evidence()
    finally:
        lab.down()
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    return 0 if result["result"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
