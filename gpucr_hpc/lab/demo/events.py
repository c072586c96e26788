"""What the agents log about one job, read back and told as sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import CONTROLLER
from gpucr_hpc.units import format_bytes

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


def lost_work_s(committed: Event, stopped_at: float) -> float:
    """Seconds of a job's work that are done again from a checkpoint. stopped_at: when its run ended, since 1970. A job
    that left with the checkpoint did nothing after it."""
    if "freeze_s" not in committed.fields:
        return 0.0
    frozen_at = float(committed.fields["began"]) + float(committed.fields["signal_to_frozen_s"])
    return round(stopped_at - frozen_at, 3)


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
                f"{event.node}: committed in {fields['commit']} s"
                + (", the job goes on" if "freeze_s" in fields else ", requeued, node released"),
            ]
        case "restored":
            return [f"{event.node}: restored in {fields['took_s']} s, the job goes on"]
        case _:
            return []
