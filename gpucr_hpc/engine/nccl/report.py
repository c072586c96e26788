"""What a process says of its communicators, and the decision that follows: who must go on, and is the cut reached?

Pure functions over reports, used by the agent, by the model of the protocol and by the tests alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpucr_hpc.wire import Frame


@dataclass(frozen=True)
class Communicator:
    """One rank's side of a communicator. gid: 16 hex digits, the same on every rank.

    state: making, ready, ending (in the call that ends it), final (finalized), lost or dead. collectives: operations of
    all ranks that this one has called. pairs: peer -> (sent, received).
    """

    gid: str
    state: str
    nranks: int
    rank: int
    device: int
    collectives: int
    by_id: bool
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.state != "dead"


@dataclass(frozen=True)
class Report:
    """One process. state: of its cut; version: of the targets it knows; busy: threads inside a call of NCCL.

    unprotected: why its communicators cannot be made again; shares: how it shares GPU memory by itself; or empty.
    cards: UUIDs of those on which it has communicators of several ranks.
    """

    state: str
    version: int
    busy: int
    unprotected: str
    why: str
    communicators: tuple[Communicator, ...]
    shares: str = ""
    cards: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Targets:
    """free: all may go on: a communicator is being made. collectives: by gid. pairs: by (gid, source, destination)."""

    free: bool = False
    collectives: dict[str, int] = field(default_factory=dict)
    pairs: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def pairs_of_frame(self, version: int) -> list[tuple[str, str]]:
        """As an NCCL frame has them."""
        return [
            ("VERSION", str(version)),
            ("FREE", str(int(self.free))),
            *(("TARGET", f"{gid} {count}") for gid, count in self.collectives.items()),
            *(("PAIR", f"{gid} {a} {b} {count}") for (gid, a, b), count in self.pairs.items()),
        ]


def parse(frame: Frame) -> Report:
    """The report in an NCCLSTATE frame; ValueError when it is malformed."""
    pairs: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    for text in frame.all("PAIR"):
        gid, rank, peer, sent, received = text.split()
        pairs.setdefault((gid, int(rank)), {})[int(peer)] = (int(sent), int(received))
    found = []
    for text in frame.all("COMM"):
        gid, state, nranks, rank, device, collectives, by_id = text.split()
        key = (gid, int(rank))
        found.append(
            Communicator(
                gid, state, int(nranks), int(rank), int(device), int(collectives), by_id == "1", pairs.get(key, {})
            )
        )
    return Report(
        frame.get("STATE"),
        frame.int("VERSION"),
        frame.int("BUSY"),
        frame.get("UNPROTECTED"),
        frame.get("WHY"),
        tuple(found),
        frame.get("SHARES"),
        frozenset(frame.all("CARD")),
    )


def by_gid(reports: Iterable[Report]) -> dict[str, list[Communicator]]:
    found: dict[str, list[Communicator]] = {}
    for report in reports:
        for communicator in report.communicators:
            found.setdefault(communicator.gid, []).append(communicator)
    return found


def transfers(sides: Sequence[Communicator]) -> dict[tuple[int, int], tuple[int, int]]:
    """(source, destination) -> (sent by the one, received by the other)."""
    found: dict[tuple[int, int], list[int]] = {}
    for side in sides:
        for peer, (sent, received) in side.pairs.items():
            found.setdefault((side.rank, peer), [0, 0])[0] += sent
            found.setdefault((peer, side.rank), [0, 0])[1] += received
    return {pair: (sent, received) for pair, (sent, received) in found.items()}


def targets(reports: Sequence[Report]) -> Targets:
    """How far every rank must go: as far as the farthest has gone, who may be waiting for it in a call of NCCL.

    A rank that makes a communicator by an id waits for ranks that nobody knows yet: then all may go on. One that ends
    a communicator may wait for the others to do so, which they do one operation farther on.
    """
    free, collectives, pairs = False, {}, {}
    for gid, sides in by_gid(reports).items():
        alive = [side for side in sides if side.alive]
        if any(side.state == "making" and side.by_id for side in sides) and len(sides) < max(s.nranks for s in sides):
            free = True
        if not alive:
            continue
        ending = any(side.state == "ending" for side in alive)
        collectives[gid] = max(side.collectives for side in sides) + ending
        for (source, destination), counts in transfers(sides).items():
            pairs[gid, source, destination] = max(counts)
    return Targets(free, collectives, pairs)


def reached(reports: Sequence[Report], version: int, latest: Targets) -> bool:
    """Whether all stand still at one cut: every rank knows the latest targets, none is inside NCCL, none is behind.

    It stays so until new targets are sent: at the gate only who is behind passes. So it must be the targets that were
    sent which nobody is behind, not others that would be sent now.
    """
    if latest.free or latest != targets(reports):
        return False
    if any(r.busy or r.version != version or r.state != "closed" for r in reports):
        return False
    for sides in by_gid(reports).values():
        alive = [side for side in sides if side.alive]
        if any(side.state == "making" for side in alive):
            return False
        farthest = max(side.collectives for side in sides)
        if any(side.collectives < farthest for side in alive):
            return False
        ranks = {side.rank for side in alive}
        for (source, destination), (sent, received) in transfers(sides).items():
            if (sent < received and source in ranks) or (received < sent and destination in ranks):
                return False
    return True


def rebuildable(reports: Sequence[Report]) -> list[str]:
    """The communicators that all of their ranks still have; of others, only the end can come."""
    return sorted(
        gid
        for gid, sides in by_gid(reports).items()
        if len([s for s in sides if s.state == "ready"]) == sides[0].nranks
    )


def obstacle(reports: Iterable[Report]) -> str:
    """Why a cut cannot be asked for, in words; empty when it can."""
    return next((report.unprotected for report in reports if report.unprotected), "")


ON_ONE_CARD = (
    "ranks of NCCL share a card, and such a job failed after its checkpoint (CUDA error 719, not explained yet): give "
    "each rank a card of its own"
)


def shared_cards(cards: Iterable[frozenset[str]]) -> set[str]:
    """Cards on which several processes have communicators, by the cards of each."""
    count = Counter(card for of_one in cards for card in of_one)
    return {card for card, processes in count.items() if processes > 1}


def incomplete(reports: Iterable[Report]) -> str:
    """Which communicator has a rank that nobody reports, in words: it has ended, or is not under the interposer. It
    could not be made again then. Only true of ranks that stand still."""
    for gid, sides in by_gid(reports).items():
        missing = max(side.nranks for side in sides) - len(sides)
        states = {side.state for side in sides}
        if missing > 0 and "ready" in states and "making" not in states:
            return f"{missing} ranks of communicator {gid} have ended or cannot be asked"
    return ""
