"""`scripts/demo`: the main job to the eye, on the lab. Standard library only.

One job runs twice side by side. One of the two is preempted by a job of a higher partition, which takes its node: it
is frozen, written to the store, requeued under its id, and goes on elsewhere. At the end the results are compared.
Every figure comes from Slurm, from the agents' logs or from `gpucr`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import CONTROLLER, HOMES
from gpucr_hpc.lab.nodes import CHECKOUT, USERS
from gpucr_hpc.lab.wait import wait_until
from gpucr_hpc.units import format_bytes

_NODES = 4
_STEPS, _MEGABYTES, _PAUSE_S = 80, 64, 0.1
_PREEMPT_AT_STEP = 15
_FIELD = re.compile(r""" (\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S*)""")


@dataclass(frozen=True)
class Event:
    """One line of an agent's log. when: seconds since the epoch."""

    node: str
    when: float
    text: str
    fields: dict[str, str]


def parse_event(node: str, line: str) -> Event | None:
    """An agent's log line (`time level event key=value ...`), or None for anything else."""
    when, _, rest = line.rstrip("\n").partition(" ")
    _level, _, rest = rest.partition(" ")
    try:
        moment = datetime.fromisoformat(when).timestamp()
    except ValueError:
        return None
    first = _FIELD.search(rest)
    fields = {key: value.strip("'\"") for key, value in _FIELD.findall(rest)}
    return Event(node, moment, rest[: first.start()] if first else rest, fields)


class Events:
    """What all agents log about one job, from now on."""

    def __init__(self, lab: Lab) -> None:
        self._files = {node: lab.log_dir(node) / "agent.log" for node in lab.nodes() if node != CONTROLLER}
        self._read = {node: path.stat().st_size if path.exists() else 0 for node, path in self._files.items()}
        self.seen: list[Event] = []

    def poll(self, job: int) -> list[Event]:
        """New events of the job since the last call, in the order of time."""
        fresh: list[Event] = []
        for node, path in self._files.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[node])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[node] += len(whole)
            events = (parse_event(node, line) for line in whole.decode(errors="replace").splitlines())
            fresh += [event for event in events if event is not None and event.fields.get("job") == str(job)]
        fresh.sort(key=lambda event: event.when)
        self.seen += fresh
        return fresh

    def last(self, text: str) -> Event:
        """The newest event of that text; LabError when there was none."""
        for event in reversed(self.seen):
            if event.text == text:
                return event
        raise LabError(reason=f"no agent wrote {text!r} about the job")


class Demo:
    """One show on a lab that is up."""

    def __init__(self, lab: Lab, say: Callable[[str], None]) -> None:
        self._lab, self._say_line = lab, say
        self._start = time.monotonic()
        self._home = f"demo-{os.getpid()}"
        self._directory = lab.state / "shared/home/alice" / self._home
        self._jobs: list[int] = []

    def _say(self, text: str) -> None:
        self._say_line(f"[{time.monotonic() - self._start:5.1f} s] {text}")

    def run(self) -> dict[str, Any]:
        """The whole show; the report of it."""
        lab = self._lab
        self._place_files()
        names = lab.nodes()[1:]
        if len(names) < 3:
            raise LabError(reason=f"the demo needs 3 nodes, the lab that is up has {len(names)}")
        program = ["iterate.sh", str(_STEPS), str(_MEGABYTES), str(_PAUSE_S)]
        reference = self._submit("alice", "-w", names[-1], *program)
        job = self._submit("alice", "-x", names[-1], *program)
        self._say(f"alice: sbatch {' '.join(program)}  (twice; the script says #SBATCH --checkpoint-on-preempt)")
        events = Events(lab)
        source = lab.wait_job(job, "RUNNING")["nodes"]
        lab.wait_job(reference, "RUNNING")
        self._say(f"job {reference} runs undisturbed on {names[-1]}, job {job} runs on {source}")
        wait_until(lambda: self._step(job) >= _PREEMPT_AT_STEP, 60, f"step {_PREEMPT_AT_STEP} of job {job}")
        self._say(f"job {job} is at step {self._step(job)} of {_STEPS}")

        other = self._submit("bob", "-p", "high", "-w", source, "--exclusive", "--wrap", "sleep 6")
        self._say(f"bob: sbatch -p high -w {source} --exclusive ...  (job {other}, outranks alice's)")
        target = self._watch(job, events, source)
        record = self._record(events, target)
        shown = self._wait_end(reference, job)
        self._say(f"both jobs are over; job {job} was started {shown['restart_cnt'] + 1} times by Slurm")
        equal = self._compare(reference, job)
        return {
            "job_id": job,
            "from_node": source,
            "to_node": shown["nodes"],
            "restarts": shown["restart_cnt"],
            "result_equal": equal,
            **record,
        }

    def clean(self) -> None:
        """End what still runs of the show and remove its files."""
        if self._lab.running() is None:
            return
        self._lab.exec(CONTROLLER, ["scancel", *map(str, self._jobs)], check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- steps of it --------------------------------------------------------------------------------------

    def _place_files(self) -> None:
        self._directory.mkdir(parents=True)
        for name in ("iterate.sh", "iterate.py"):
            shutil.copy2(CHECKOUT / "examples" / name, self._directory / name)
        for path in (self._directory, *self._directory.iterdir()):
            os.chown(path, USERS["alice"], 100)

    def _submit(self, user: str, *words: str) -> int:
        where = f"{HOMES}/alice/{self._home}" if user == "alice" else f"{HOMES}/{user}"
        argv = ["env", "-C", where, "sbatch", "--parsable", *words]
        job = int(self._lab.exec(CONTROLLER, argv, user=user).stdout.split(";")[0])
        self._jobs.append(job)
        return job

    def _output(self, job: int) -> list[str]:
        path = self._directory / f"iterate-{job}.out"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def _step(self, job: int) -> int:
        steps = [int(line.split()[1]) for line in self._output(job) if line.startswith("step ")]
        return max(steps, default=0)

    def _watch(self, job: int, events: Events, source: str) -> str:
        """Tell what happens until the job is restored; the node where it is."""
        state = ""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for event in events.poll(job):
                for line in told(event):
                    self._say(f"  {line}")
                if event.text == "restored":
                    return event.node
                if event.text in ("checkpoint failed", "job not taken"):
                    raise LabError(reason=f"{event.node}: {event.text}: {event.fields.get('error')}")
            seen = self._lab.job(job)
            now = "+".join(seen["job_state"]) + (f" on {seen['nodes']}" if seen["nodes"] else "")
            if now != state:
                self._say(f"  Slurm: job {job} is {now}")
                state = now
            time.sleep(0.1)
        raise LabError(reason=f"job {job} did not come back from {source} within 120 s")

    def _record(self, events: Events, target: str) -> dict[str, Any]:
        """Phases and sizes of the move, from the agents and the manifest, while the checkpoint still exists."""
        left, back = events.last("checkpoint committed"), events.last("restored")
        checkpoint = left.fields["checkpoint"]
        shown = self._lab.exec(target, ["gpucr", "show", checkpoint, "--json"], user="alice").stdout
        manifest = json.loads(shown)
        images, meta = manifest["images"], manifest["meta"]
        requeued = left.when - float(left.fields["finish"])
        restore_s = float(back.fields["took_s"])
        phases = {
            "signal_to_frozen": meta["signal_to_frozen_s"],
            "dump": meta["dump_s"],
            "commit": float(left.fields["commit"]),
            "requeue_to_running": round(back.when - restore_s - requeued, 3),
            "restore": restore_s,
        }
        return {
            "phases_s": phases,
            "bytes_plain": sum(image["bytes_plain"] for image in images),
            "bytes_stored": sum(image["bytes_stored"] for image in images),
        }

    def _wait_end(self, reference: int, job: int) -> dict[str, Any]:
        def over() -> bool:
            first, second = self._step(reference), self._step(job)
            self._say(f"  undisturbed: step {first:2}   protected: step {second:2}   of {_STEPS}")
            time.sleep(2)
            return all(any(line.startswith("RESULT") for line in self._output(j)) for j in (reference, job))

        wait_until(over, 180, "the results")
        self._lab.wait_job(reference, "COMPLETED")
        return self._lab.wait_job(job, "COMPLETED")

    def _compare(self, reference: int, job: int) -> bool:
        """Every line that the program wrote, in order: no byte lost, none doubled."""
        one, two = (program_lines(self._output(number)) for number in (reference, job))
        for name, lines in (("undisturbed", one), ("protected", two)):
            self._say(f"{name:12} {next((line for line in lines if line.startswith('RESULT')), 'no result')}")
        return one == two and any(line.startswith("RESULT") for line in one)


def program_lines(output: Sequence[str]) -> list[str]:
    """An output without what Slurm and gpucr wrote into it."""
    return [line for line in output if not line.startswith(("gpucr: ", "["))]


def told(event: Event) -> list[str]:
    """Sentences for an agent's event."""
    fields = event.fields
    match event.text:
        case "signal":
            return [f"{event.node}: Slurm's signal {fields['signal']} came: {fields['decision']}"]
        case "checkpoint begins":
            left = fields.get("budget_s") or fields.get("left_s", "?")
            return [f"{event.node}: checkpoint {fields['checkpoint']} begins, {left} s at most"]
        case "checkpoint committed":
            plain, stored = int(fields["bytes_plain"]), int(fields["bytes_stored"])
            return [
                f"{event.node}: all tasks frozen, {fields['signal_to_frozen_s']} s after the signal",
                f"{event.node}: dumped in {fields['dump_s']} s: {format_bytes(plain)}, {format_bytes(stored)} stored",
                f"{event.node}: committed in {fields['commit']} s, requeued, node released",
            ]
        case "restored":
            return [f"{event.node}: restored in {fields['took_s']} s, the job goes on"]
        case _:
            return []


def closing_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    phases = report["phases_s"]
    own_s = phases["signal_to_frozen"] + phases["dump"] + phases["commit"]
    way = f"from {report['from_node']} to {report['to_node']}"
    return [
        f"job {report['job_id']} moved {way} (restarts: {report['restarts']})",
        f"  signal to frozen    {phases['signal_to_frozen']:7.3f} s",
        f"  dump                {phases['dump']:7.3f} s",
        f"  commit              {phases['commit']:7.3f} s   (signal to commit: {own_s:.3f} s)",
        f"  requeue to running  {phases['requeue_to_running']:7.3f} s   (Slurm's)",
        f"  restore             {phases['restore']:7.3f} s",
        f"  size                {format_bytes(report['bytes_plain'])} plain, {format_bytes(report['bytes_stored'])} "
        "compressed and encrypted",
        f"result equal to the undisturbed run: {'yes' if report['result_equal'] else 'NO'}",
    ]


def main(args: Sequence[str] | None = None) -> int:
    """Run the show; 0 only when the job moved and its result is that of the undisturbed run."""
    parser = argparse.ArgumentParser(prog="demo", description="A preempted job goes on, on another node (root).")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on the last line")
    parser.add_argument("--keep", action="store_true", help="leave the lab up for a look around")
    options = parser.parse_args(args)

    def say(line: str) -> None:
        print(line, flush=True)

    lab = Lab(say=say)
    was_up = running = lab.running()
    demo = None
    try:
        say("a Slurm cluster of namespaces on this host: scripts/lab up")
        if running is None:
            lab.up(_NODES)
        else:
            lab.need_own_checkout()
            lab.up(len(running.nodes), running.settings)
        demo = Demo(lab, say)
        report = demo.run()
    except GpucrError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        if error.advice():
            print(f"demo: hint: {error.advice()}", file=sys.stderr)
        return error.exit_code
    finally:
        _leave(lab, demo, keep=options.keep or was_up is not None)
    moved = report["from_node"] != report["to_node"] and report["restarts"] > 0
    print("\n".join(closing_lines(report)))
    if options.json:
        print(json.dumps(report))
    return 0 if moved and report["result_equal"] else 1


def _leave(lab: Lab, demo: Demo | None, *, keep: bool) -> None:
    if demo is not None:
        demo.clean()
    if not keep:
        lab.down()
    elif demo is not None:
        print("the lab stays up: scripts/lab status, scripts/lab down")


if __name__ == "__main__":
    sys.exit(main())
