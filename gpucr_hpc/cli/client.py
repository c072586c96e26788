"""Requests to the agent of this node over its control socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from gpucr_hpc import errors
from gpucr_hpc.config import load
from gpucr_hpc.errors import AgentUnreachable, GpucrError
from gpucr_hpc.wire import peer_of

Progress = Callable[[dict[str, Any]], None]


class AgentError(GpucrError):
    """{message}"""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(message=record["message"])
        self._record = record
        self.exit_code = int(record["code"])  # type: ignore[misc]

    def advice(self) -> str:
        return str(self._record["hint"])

    def as_dict(self) -> dict[str, object]:
        return self._record


def agent_pid() -> int | None:
    """Process of this node's agent, None when none answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(f"{load().agent.run_dir}/control.sock")
        except OSError:
            return None
        return peer_of(sock).pid


def ask(op: str, *, progress: Progress | None = None, **fields: Any) -> dict[str, Any]:
    """Send one request and return its result; raise AgentUnreachable, or the agent's own error."""
    path = f"{load().agent.run_dir}/control.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
            sock.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            with sock.makefile("r", encoding="utf-8") as answers:
                for line in answers:
                    record: dict[str, Any] = json.loads(line)
                    if record["type"] == "exit_error":
                        raise AgentError(record)
                    if record["type"] == "result":
                        return record
                    if progress is not None:
                        progress(record)
        except OSError as error:
            raise AgentUnreachable(path=path, reason=error.strerror or error) from None
    raise errors.AgentUnreachable(path=path, reason="it closed the connection without an answer")
