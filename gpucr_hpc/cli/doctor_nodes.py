"""`gpucr doctor --nodes`: the same checks on other nodes, over SSH by Fabric, and one table of what they found.

For administrators, who can log in to their nodes; nothing else in gpucr uses SSH. A node whose key is not in
known_hosts is not talked to: what it says would be believed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucr_hpc.errors import ToolMissing

_COMMAND = "gpucr doctor --json"
_AT_ONCE = 64  # a thread each
_CONNECT_LIMIT_S = 15
_COMMAND_LIMIT_S = 180
_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")

Finding = dict[str, Any]


def examine(nodes: Sequence[str], user: str = "") -> dict[str, list[Finding]]:
    """The findings of `gpucr doctor` on each node; one that could not be asked has a single bad one.

    user: whom to log in as; "" leaves that to ~/.ssh/config. Raises ToolMissing without Fabric.
    """
    try:
        import fabric
        import paramiko
    except ImportError:
        raise ToolMissing(tool="Fabric (python3-fabric, or pip install 'gpucr-hpc[ssh]')") from None
    found: dict[str, list[Finding]] = {}
    for at in range(0, len(nodes), _AT_ONCE):
        some = nodes[at : at + _AT_ONCE]
        connections = []
        for node in some:
            connection = fabric.Connection(node, user=user or None, connect_timeout=_CONNECT_LIMIT_S)
            connection.client.load_system_host_keys()
            if _KNOWN_HOSTS.exists():
                connection.client.load_system_host_keys(str(_KNOWN_HOSTS))
            connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
            connections.append(connection)
        with fabric.ThreadingGroup.from_connections(connections) as group:
            try:
                results = group.run(_COMMAND, hide=True, warn=True, in_stream=False, timeout=_COMMAND_LIMIT_S)
            except fabric.exceptions.GroupException as error:
                results = error.result
        for node, connection in zip(some, connections, strict=True):
            found[node] = findings_of(results[connection])
    return found


def findings_of(result: Any) -> list[Finding]:
    """What a node answered: Fabric's Result, or the exception that stands in its place."""
    if isinstance(result, BaseException):
        reason = str(result) or type(result).__name__
        return [_unasked(reason, "can you `ssh` to it without a password, and is its key in known_hosts?")]
    try:
        return [dict(finding) for finding in json.loads(result.stdout)["findings"]]
    except (ValueError, KeyError, TypeError):
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.exited}"]
        return [_unasked(f"`{_COMMAND}`: {lines[-1]}", "is gpucr installed there, and root's or your right to run it?")]


def _unasked(reason: str, advice: str) -> Finding:
    return {"what": "node", "good": False, "detail": reason, "advice": advice}


def rows(found: dict[str, list[Finding]]) -> list[tuple[list[str], Finding]]:
    """What is wrong, each with all nodes that say it in the same words; then the nodes on which nothing is."""
    same: dict[tuple[str, str], tuple[list[str], Finding]] = {}
    for node, findings in found.items():
        for finding in findings:
            if not finding["good"]:
                key = (finding["what"], finding["detail"])
                same.setdefault(key, ([], finding))[0].append(node)
    well = [node for node, findings in found.items() if all(f["good"] for f in findings)]
    good: Finding = {"what": "all", "good": True, "detail": "nothing stands against protected jobs", "advice": ""}
    return [*same.values(), *([(well, good)] if well else [])]
