"""Sessions that CRIU cannot make again: it says so at the restore, when the job has left its node.

A process cannot join a session. So CRIU forks each one while its parent is in the session that the child is to be in,
and the parent may change its session once. What does not come about so has no way back (criu/pstree.c,
prepare_pstree_ids).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpucr_hpc.capsule.processes import Process


def of(processes: list[Process]) -> dict[int, tuple[int, int]]:
    """Parent and session of each process, all by their numbers on the host."""
    found = {}
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/stat", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        found[process.pid] = (int(words[1]), int(words[3]))
    return found


def unrestorable(tasks: Mapping[int, tuple[int, int]], root: int) -> list[int]:
    """Processes whose session CRIU cannot restore. tasks: parent and session by number; root: of the dump."""
    parents = {pid: parent for pid, (parent, _) in tasks.items()}
    sessions = {pid: session for pid, (_, session) in tasks.items()}
    for pid, (parent, session) in tasks.items():
        # Orphans: CRIU lets a helper fork them, below the session's leader, or as the leader where that has ended.
        if parent == root and session not in (pid, sessions.get(root)):
            helper, above = (-session, session) if session in tasks else (session, root)
            parents[pid], parents[helper], sessions[helper] = helper, above, session
    found: list[int] = []
    born: dict[int, int] = {}
    for pid, (_, session) in tasks.items():
        at = parents[pid]
        if pid in (root, session) or sessions.get(at) == session:
            continue
        while at in sessions and at != session and born.setdefault(at, session) == session:
            at = parents[at]
        if at != session:
            found.append(pid)
    return found
