"""Command line of the demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from gpucr_hpc.errors import GpucrError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.demo.operations import Drain, NodeFailure, Walltime
from gpucr_hpc.lab.demo.preemption import MpiPreemption, Preemption
from gpucr_hpc.lab.demo.scenario import Show

# One of these is chosen by its option; the first is the default.
SCENARIOS: tuple[type[Show], ...] = (Preemption, MpiPreemption, NodeFailure, Walltime, Drain)


def main(args: Sequence[str] | None = None) -> int:
    """Run the show; 0 only when the jobs went on elsewhere and their results are those of undisturbed runs."""
    default, *others = SCENARIOS
    parser = argparse.ArgumentParser(prog="demo", description=f"By default: {default.help} (root).")
    which = parser.add_mutually_exclusive_group()
    for other in others:
        which.add_argument(other.option, action="store_const", const=other, dest="scenario", help=other.help)
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on the last line")
    parser.add_argument("--keep", action="store_true", help="leave the lab up for a look around")
    parser.set_defaults(scenario=default)
    options = parser.parse_args(args)

    def say(line: str) -> None:
        print(line, flush=True)

    lab = Lab(say=say)
    was_up = running = lab.running()
    scenario = None
    try:
        say("a Slurm cluster of namespaces on this host: scripts/lab up")
        if running is None:
            lab.up(options.scenario.lab_nodes, options.scenario.lab_settings)
        else:
            lab.need_own_checkout()
            lab.up(len(running.nodes), running.settings)
        scenario = options.scenario(lab, say)
        report = scenario.run()
    except GpucrError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        if error.advice():
            print(f"demo: hint: {error.advice()}", file=sys.stderr)
        return error.exit_code
    finally:
        _leave(lab, scenario, keep=options.keep or was_up is not None)
    print("\n".join(scenario.closing(report)))
    if options.json:
        print(json.dumps(report))
    return 0 if scenario.passed(report) else 1


def _leave(lab: Lab, scenario: Show | None, *, keep: bool) -> None:
    if scenario is not None:
        scenario.clean()
    if not keep:
        lab.down()
    elif scenario is not None:
        print("the lab stays up: scripts/lab status, scripts/lab down")


if __name__ == "__main__":
    sys.exit(main())
