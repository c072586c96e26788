"""Which checkpoints of one job may go. Pure; the caller knows what is good and whether the job still lives.

Who calls: the agent after a commit and at low space, `gpucr prune`. A checkpoint never needs an older one's directory:
what it refers to lies linked in its own, so removing any leaves the others whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gpucr_hpc.model import CheckpointId


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint. good: its manifest can be trusted and its files are there."""

    checkpoint: CheckpointId
    good: bool


def time_of(checkpoint: CheckpointId) -> float:
    """Seconds since 1970 at which a checkpoint's id was made, to the second."""
    return datetime.strptime(checkpoint[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


def removable(
    candidates: Sequence[Candidate],
    *,
    live: bool,
    now: float,
    keep_last: int | None = None,
    keep_within_s: float | None = None,
) -> list[CheckpointId]:
    """The checkpoints of a job that may go, oldest first.

    Everything older than both the keep_last-th newest good one and keep_within_s seconds before now; a limit that is
    None asks to keep nothing, both None keep all. Damaged ones count for nothing and go with the good ones of their
    age. Of a live job the newest good one stays, with all that are newer; without a good one all stay.
    """
    if keep_last is None and keep_within_s is None:
        return []
    ordered = sorted(candidates, key=lambda c: c.checkpoint)
    good = [c.checkpoint for c in ordered if c.good]
    wanted = max(keep_last or 0, 1 if live else 0)
    if wanted > len(good):
        return []
    oldest_kept = good[-wanted] if wanted else None
    return [
        c.checkpoint
        for c in ordered
        if (oldest_kept is None or c.checkpoint < oldest_kept)
        and (keep_within_s is None or time_of(c.checkpoint) < now - keep_within_s)
    ]
