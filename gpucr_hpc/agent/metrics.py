"""Figures for Prometheus: counted here, served as text by HTTP on this node's loopback address alone.

Written by hand, since the text format is a few lines and a library would bring a server with threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpucr_hpc import wire

if TYPE_CHECKING:
    from gpucr_hpc.agent.job import ProtectedJob

_REQUEST_LIMIT_S = 5.0
_HELP = {
    "gpucr_checkpoints_total": ("counter", "Checkpoints that this agent has led, by reason and result."),
    "gpucr_checkpoint_bytes_total": ("counter", "Bytes stored by them."),
    "gpucr_checkpoint_seconds_total": ("counter", "Seconds from their order to their commit."),
    "gpucr_freeze_seconds_total": ("counter", "Seconds that jobs stood still for checkpoints after which they ran on."),
    "gpucr_restores_total": ("counter", "Restores that this agent has led, by result."),
    "gpucr_restore_seconds_total": ("counter", "Seconds that the good ones took."),
    "gpucr_jobs": ("gauge", "Protected jobs on this node, by what is happening to them."),
    "gpucr_last_checkpoint_timestamp_seconds": ("gauge", "When a job's last checkpoint was begun."),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Metrics:
    """Sums since the agent's start."""

    sums: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter of `_HELP`."""
        key = (name, tuple(sorted(labels.items())))
        self.sums[key] = self.sums.get(key, 0.0) + value

    def checkpoint(self, reason: str, report: dict[str, Any] | None) -> None:
        """One checkpoint more; report: None when it failed."""
        self.add("gpucr_checkpoints_total", reason=reason, result="failed" if report is None else "good")
        if report is not None:
            self.add("gpucr_checkpoint_bytes_total", float(report["bytes_stored"]))
            self.add("gpucr_checkpoint_seconds_total", float(report["total_s"]))
            self.add("gpucr_freeze_seconds_total", float(report.get("freeze_s", 0.0)))

    def restore(self, took_s: float | None) -> None:
        """One restore more; took_s: None when it failed."""
        self.add("gpucr_restores_total", result="failed" if took_s is None else "good")
        if took_s is not None:
            self.add("gpucr_restore_seconds_total", took_s)

    def text(self, jobs: Iterable[ProtectedJob]) -> str:
        """Everything in Prometheus' text format."""
        found = dict(self.sums)
        for job in jobs:
            key = ("gpucr_jobs", (("phase", str(job.phase)),))
            found[key] = found.get(key, 0.0) + 1
            if "began" in job.last:
                found["gpucr_last_checkpoint_timestamp_seconds", (("job", job.job),)] = float(job.last["began"])
        lines = []
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for (whose, labels), value in sorted(found.items()):
                if whose == name:
                    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
                    lines.append(f"{name}{{{shown}}} {value:.17g}" if shown else f"{name} {value:.17g}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def serve(port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answer GET /metrics on 127.0.0.1; raises OSError when the port is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_LIMIT_S)
            known = head.split(b" ")[:2] == [b"GET", b"/metrics"]
            body = text().encode() if known else b"only GET /metrics\n"
            status = "200 OK" if known else "404 Not Found"
            top = (
                f"HTTP/1.1 {status}",
                "Content-Type: text/plain; version=0.0.4; charset=utf-8",
                f"Content-Length: {len(body)}",
                "Connection: close",
            )
            writer.write("\r\n".join(top).encode() + b"\r\n\r\n" + body)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(wire.ends_quietly(answer), "127.0.0.1", port, limit=1 << 14)


#: Of this agent.
METRICS = Metrics()
