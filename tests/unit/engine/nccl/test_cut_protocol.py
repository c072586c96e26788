"""Every way a cut can be taken, explored: all interleavings of ranks that call NCCL, the reports and the targets.

The ranks are small programs (collectives, send and receive, groups over several communicators, one that is made by an
id); each may be stopped anywhere. Decisions are the product's own functions (`targets`, `reached`); the gate is that of
spank_plugin/nccl/gate.c. Calls block as NCCL's may: the first collective of a communicator returns only when all ranks
have called it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from gpucr_hpc.engine.nccl.report import Communicator, Report, Targets, reached, rebuildable, targets

# A call: ("all", communicator), ("send", communicator, peer), ("recv", communicator, peer), ("init", communicator).
Call = tuple[str, ...]
Unit = tuple[Call, ...]  # a call, or a group
Program = tuple[Unit, ...]
A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


@dataclass(frozen=True)
class Rank:
    """at: next unit. inside: it is in that unit (its calls are counted). version: of the targets at its gate."""

    at: int = 0
    inside: bool = False
    closed: bool = False
    version: int = 0


@dataclass(frozen=True)
class State:
    """history: targets by version, 1 first. phase: taking, drained."""

    ranks: tuple[Rank, ...]
    history: tuple[Targets, ...] = ()
    phase: str = "taking"

    def __hash__(self) -> int:
        return hash((self.ranks, len(self.history), self.phase, str(self.history[-1:])))


@dataclass(frozen=True)
class Rules:
    """Variants of the protocol; the defaults are what is built."""

    count_at_entry: bool = True  # an operation counts when it is called, not when it returns
    raise_targets: bool = True  # what a rank does on its way raises the targets of the others
    all_know: bool = True  # the cut is reached when all ranks know the latest targets


@dataclass(frozen=True)
class Job:
    programs: tuple[Program, ...]
    members: dict[str, tuple[int, ...]]
    blocking: bool


def done(job: Job, state: State, rank: int, rules: Rules) -> int:
    """Number of units that count for a rank."""
    r = state.ranks[rank]
    return r.at + (r.inside and rules.count_at_entry)


def communicators(job: Job, state: State, rank: int, rules: Rules) -> list[Communicator]:
    calls = [call for unit in job.programs[rank][: done(job, state, rank, rules)] for call in unit]
    r, found = state.ranks[rank], []
    for gid, members in job.members.items():
        by_id = any(call[:2] == ("init", gid) for unit in job.programs[rank] for call in unit)
        if rank not in members or (by_id and ("init", gid) not in calls):
            continue
        making = r.inside and ("init", gid) in job.programs[rank][r.at]
        pairs = {}
        for peer, member in enumerate(members):
            sent = sum(call == ("send", gid, str(member)) for call in calls)
            received = sum(call == ("recv", gid, str(member)) for call in calls)
            if sent or received:
                pairs[peer] = (sent, received)
        count = sum(call == ("all", gid) for call in calls)
        state_name = "making" if making else "ready"
        found.append(Communicator(gid, state_name, len(members), members.index(rank), 0, count, by_id, pairs))
    return found


def report(job: Job, state: State, rank: int, rules: Rules) -> Report:
    r = state.ranks[rank]
    return Report(
        "closed" if r.closed else "open",
        r.version,
        int(r.inside),
        "",
        "",
        tuple(communicators(job, state, rank, rules)),
    )


def behind(job: Job, state: State, rank: int, rules: Rules) -> bool:
    """The gate's own question."""
    r = state.ranks[rank]
    if r.version == 0:
        return False
    known = state.history[r.version - 1]
    for c in communicators(job, state, rank, rules):
        if c.collectives < known.collectives.get(c.gid, 0):
            return True
        for peer in range(c.nranks):
            sent, received = c.pairs.get(peer, (0, 0))
            if sent < known.pairs.get((c.gid, c.rank, peer), 0) or received < known.pairs.get((c.gid, peer, c.rank), 0):
                return True
    return known.free


def can_return(job: Job, state: State, rank: int) -> bool:
    """Whether the unit that a rank is in can return: NCCL may wait for others, in an init and at first uses."""
    for call in job.programs[rank][state.ranks[rank].at]:
        gid = call[1]
        if call[0] == "all" and not job.blocking:
            continue
        if call[0] in ("send", "recv") and not job.blocking:
            continue
        others = [int(call[2])] if len(call) == 3 else [m for m in job.members[gid] if m != rank]
        mirror = {"send": ("recv", gid, str(rank)), "recv": ("send", gid, str(rank))}.get(call[0], call)
        for other in others:
            entered = state.ranks[other].at + state.ranks[other].inside
            there = sum(c == mirror for unit in job.programs[other][:entered] for c in unit)
            mine = sum(c == call for unit in job.programs[rank][: state.ranks[rank].at + 1] for c in unit)
            if there < mine:
                return False
    return True


def put(ranks: tuple[Rank, ...], at: int, rank: Rank) -> tuple[Rank, ...]:
    return (*ranks[:at], rank, *ranks[at + 1 :])


def steps(job: Job, state: State, rules: Rules) -> Iterator[State]:
    if state.phase != "taking":
        return
    for i, r in enumerate(state.ranks):
        if not r.closed:
            yield replace(state, ranks=put(state.ranks, i, replace(r, closed=True)))
        if r.inside:
            if can_return(job, state, i):
                yield replace(state, ranks=put(state.ranks, i, replace(r, at=r.at + 1, inside=False)))
        elif r.at < len(job.programs[i]) and (not r.closed or behind(job, state, i, rules)):
            yield replace(state, ranks=put(state.ranks, i, replace(r, inside=True)))
        if r.closed and r.version < len(state.history):
            yield replace(state, ranks=put(state.ranks, i, replace(r, version=len(state.history))))
    if all(r.closed for r in state.ranks):
        reports = [report(job, state, i, rules) for i in range(len(state.ranks))]
        wanted = targets(reports)
        version = len(state.history)
        if version == 0 or (wanted != state.history[-1] and rules.raise_targets):
            yield replace(state, history=(*state.history, wanted))
        if version:
            known = reports if rules.all_know else [replace(r, version=version) for r in reports]
            if reached(known, version, state.history[-1] if rules.raise_targets else targets(reports)):
                yield replace(state, phase="drained")


def violations(job: Job, state: State, rules: Rules, *, final: bool) -> Iterator[str]:
    if state.phase == "drained":
        yield from torn(job, state)
    elif final:
        yield "stuck: neither reached nor anybody to go on"


def torn(job: Job, state: State) -> Iterator[str]:
    """At the cut every operation must have all its sides, or draining never ends; and no gate may let anybody in."""
    calls = [[c for unit in job.programs[i][: r.at + r.inside] for c in unit] for i, r in enumerate(state.ranks)]
    for gid, members in job.members.items():
        if len({sum(c == ("all", gid) for c in calls[m]) for m in members}) > 1:
            yield "a collective lacks a rank"
        for a in members:
            for b in members:
                sent = sum(c == ("send", gid, str(b)) for c in calls[a])
                if sent != sum(c == ("recv", gid, str(a)) for c in calls[b]):
                    yield "a message lacks its other side"
    for i, r in enumerate(state.ranks):
        if r.inside:
            yield "a rank is inside NCCL"
        if r.at < len(job.programs[i]) and (not r.closed or behind(job, state, i, Rules())):
            yield "a gate is open"


def explore(job: Job, rules: Rules) -> tuple[int, set[str]]:
    start = State(tuple(Rank() for _ in job.programs))
    seen, todo, bad = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = list(steps(job, state, rules))
        bad |= set(violations(job, state, rules, final=not following))
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), bad


def one(*calls: Call) -> Program:
    return tuple((call,) for call in calls)


ALL_A, ALL_B = ("all", A), ("all", B)


def job(name: str, *, blocking: bool) -> Job:
    two = {A: (0, 1), B: (0, 1)}
    ring = {A: (0, 1, 2), B: (1, 2)}
    return {
        "collectives": Job((one(ALL_A, ALL_B, ALL_A),) * 2, two, blocking),
        "groups": Job((((ALL_A, ALL_B), (ALL_A,), (ALL_B,)),) * 2, two, blocking),
        "pipeline": Job(
            (
                one(("send", A, "1"), ("send", A, "1")),
                one(("recv", A, "0"), ("send", A, "2"), ("recv", A, "0"), ("send", A, "2")),
                one(("recv", A, "1"), ("recv", A, "1")),
            ),
            {A: (0, 1, 2)},
            blocking,
        ),
        "overlapping": Job((one(ALL_A, ALL_A), one(ALL_A, ALL_B, ALL_A), one(ALL_A, ALL_B, ALL_A)), ring, blocking),
        "made": Job((one(ALL_A, ("init", B), ALL_B),) * 2, two, blocking),
        "exchange": Job(
            (
                ((("send", A, "1"), ("recv", A, "1")), (ALL_A,)),
                ((("send", A, "0"), ("recv", A, "0")), (ALL_A,)),
            ),
            {A: (0, 1)},
            blocking,
        ),
    }[name]


JOBS = ("collectives", "groups", "pipeline", "overlapping", "made", "exchange")


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_a_cut_is_always_reached_and_whole(name: str, blocking: bool) -> None:
    """From every point of every rank: no dead-lock, no operation without one of its sides, every gate shut."""
    states, bad = explore(job(name, blocking=blocking), Rules())
    assert states > 50
    assert bad == set()


@pytest.mark.parametrize(
    ("name", "rules", "expected"),
    [
        ("collectives", Rules(count_at_entry=False), "stuck: neither reached nor anybody to go on"),
        ("pipeline", Rules(raise_targets=False), "stuck: neither reached nor anybody to go on"),
        ("made", Rules(all_know=False), "a gate is open"),
    ],
)
def test_weaker_protocols_are_found_out(name: str, rules: Rules, expected: str) -> None:
    """The model is able to fail: without a rule the state that the rule prevents is reached."""
    assert expected in explore(job(name, blocking=True), rules)[1]


def test_only_whole_communicators_are_made_again() -> None:
    """One that a rank has destroyed or finalized is not, on no rank."""
    whole = [Communicator(A, "ready", 2, r, 0, 3, True) for r in range(2)]
    left = [Communicator(B, "ready", 2, 0, 0, 3, True), Communicator(B, "dead", 2, 1, 0, 3, True)]
    reports = [Report("closed", 1, 0, "", "", (whole[i], left[i])) for i in range(2)]
    assert rebuildable(reports) == [A]
