"""`scripts/measure_migration`: a job of several nodes under TCP traffic, moved again and again.

Every round is a real checkpoint, requeue under the same id and restore on other nodes; the job checks every byte of
its own connection. Printed: each round's times, every failure, and at the end how many rounds went well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab import traffic
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES
from gpucr_hpc.lab.wait import wait_until

_RESTART_LIMIT_S = 90.0
_MOST_FAILURES = 5


def _script(nodes: int, stop: str) -> str:
    return (
        "#!/bin/bash\n#SBATCH --checkpoint-on-preempt\n"
        f"#SBATCH --nodes={nodes} --ntasks-per-node=1 --output=traffic-%j.out\n"
        f"srun --ntasks=2 --nodes=2 python3 traffic.py {stop}\n"
    )


class Soak:
    """One job, moved round after round."""

    def __init__(self, lab: Lab, nodes: int) -> None:
        self._lab, self._nodes = lab, nodes
        self._home = lab.state / HOMES.lstrip("/") / "alice"
        self.job = 0

    def start(self) -> None:
        shutil.copyfile(traffic.__file__, self._home / "traffic.py")
        (self._home / "traffic.stop").unlink(missing_ok=True)
        self.job = self._lab.sbatch(_script(self._nodes, "traffic.stop"), "alice")
        wait_until(lambda: self._blocks() > 0, 60, "traffic between the ranks")

    def _output(self) -> str:
        path = self._home / f"traffic-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _blocks(self) -> int:
        """Blocks that the slower rank has counted."""
        counts = {0: 0, 1: 0}
        for line in self._output().splitlines():
            words = line.split()
            if len(words) == 4 and words[0] == "rank" and words[3] == "blocks":
                counts[int(words[1].rstrip(":"))] = int(words[2])
        return min(counts.values())

    def _restored(self) -> int:
        """How often the agents said in the job's output that it is back."""
        return self._output().count("gpucr: restored on ")

    def _running_on(self) -> list[str]:
        job = self._lab.job(self.job)
        return self._lab.hostnames(job["nodes"]) if "RUNNING" in job["job_state"] else []

    def round(self) -> dict[str, object]:
        """Move the job once; raise LabError when it does not come back with its connection whole."""
        before, restored, start = self._running_on(), self._restored(), time.monotonic()
        restarts = self._lab.job(self.job)["restart_cnt"]
        self._lab.exec(before[0], ["gpucr", "checkpoint", str(self.job), "--requeue"], user="alice")
        wait_until(
            lambda: self._lab.job(self.job)["restart_cnt"] > restarts and bool(self._running_on()),
            _RESTART_LIMIT_S,
            "the job to run again",
        )
        wait_until(lambda: self._ended() or self._restored() > restored, _RESTART_LIMIT_S, "the restore")
        blocks = self._blocks()
        wait_until(lambda: self._ended() or self._blocks() > blocks, _RESTART_LIMIT_S, "traffic after the move")
        if self._ended():
            raise LabError(reason=f"the job ended: {self._output()[-600:]}")
        after = self._running_on()
        return {"from": before, "to": after, "seconds": round(time.monotonic() - start, 2), "blocks": self._blocks()}

    def _ended(self) -> bool:
        return self._lab.is_over(self.job)

    def finish(self) -> None:
        """Let the job end; raise LabError unless both ranks found every block good."""
        (self._home / "traffic.stop").touch()
        wait_until(self._ended, 60, "the job's end")
        output = self._output()
        if "COMPLETED" not in self._lab.job(self.job)["job_state"] or output.count("blocks good") != 2:
            raise LabError(reason=f"the job failed: {output[-600:]}")


def soak(lab: Lab, nodes: int, rounds: int) -> tuple[list[dict[str, object]], list[str]]:
    """Rounds that went well, and what went wrong. After a failure a new job goes on with the next round."""
    done: list[dict[str, object]] = []
    failures: list[str] = []
    number = 0
    while number < rounds and len(failures) < _MOST_FAILURES:
        job = Soak(lab, nodes)
        try:
            job.start()
            while number < rounds:
                number += 1
                done.append({"round": number} | job.round())
                print(f"round {number}: {done[-1]}", flush=True)
            job.finish()
        except GpucrError as error:
            failures.append(f"round {number}, job {job.job}: {error}")
            print(f"failure: {failures[-1]}", file=sys.stderr, flush=True)
            lab.cancel_all()
    return done, failures


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 when every round went well."""
    parser = argparse.ArgumentParser(prog="measure_migration", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the job; the lab has twice as many")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(args)
    try:
        with Lab().at_hand(2 * options.nodes) as lab:
            done, failures = soak(lab, options.nodes, options.rounds)
    except GpucrError as error:
        print(f"measure_migration: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(done)} of {options.rounds} rounds went well, failures: {len(failures)}")
    for failure in failures:
        print(f"  {failure}")
    if options.json:
        print(json.dumps({"rounds": len(done), "asked": options.rounds, "failures": failures, "each": done}))
    return 0 if len(done) == options.rounds and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
