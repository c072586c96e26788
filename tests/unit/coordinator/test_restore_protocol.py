"""Every way a restore of several nodes can go, explored: crashes of any agent, loss of any connection, at every step.

A model of docs/architecture.md, "A restore of several nodes", searched whole for two and three nodes: the lead (a
program counter and the journal that its successor reads), every node's part with the attempt that it belongs to, the
connections, and Slurm, which may take the run away. A node's agent that dies is a lost connection: its successor
removes a part that is not open and keeps one that is. The second half shows that the model can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

# A node has nothing of the job, a capsule, the tree (it runs, its network locked), or all of it with an open network.
NONE, BUILT, BACK, OPEN = "none", "built", "back", "open"
PHASES = ("build", "run", "open", "done")
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Part:
    """What a node has, the attempt that made it, and the attempt whose srun its tasks' supervisors belong to."""

    state: str = NONE
    attempt: int = 0
    srun: int = 0


@dataclass(frozen=True)
class State:
    """pc, told: what the lead does, and the nodes that have done it. linked: the attempt whose connection a node sees,
    0 without; late: nodes that have not yet noticed the end of an earlier attempt's connection. running: the lead's
    journal says that the job runs. lead: "alive", "dead", "held" (it has given up), "over" (Slurm has taken the run).
    """

    parts: tuple[Part, ...]
    linked: tuple[int, ...]
    pc: str = "build"
    told: frozenset[int] = frozenset()
    attempt: int = 1
    late: frozenset[tuple[int, int]] = frozenset()
    running: bool = False
    lead: str = "alive"
    faults: int = 0


@dataclass(frozen=True)
class Rules:
    """Variants of the protocol; the defaults are what is built."""

    barrier: bool = True  # no network is opened before every tree is back
    lead_last: bool = True  # the lead opens its own part when the others are open
    all_anew: bool = True  # a successor that finds a restore under way begins it again; it does not keep its own tree
    clear: bool = True  # a node removes what it has of earlier attempts before it builds
    launches: bool = True  # supervisors of an srun of an earlier attempt are sent away


def initial(nodes: int) -> State:
    return State((Part(),) * nodes, (1,) * nodes)


def put(state: State, node: int, part: Part) -> State:
    return replace(state, parts=(*state.parts[:node], part, *state.parts[node + 1 :]))


def lose(state: State, node: int) -> State:
    """The connection ends for the lead at once, for the node some time later."""
    late = state.late | {(node, state.linked[node])}
    return replace(state, linked=(*state.linked[:node], 0, *state.linked[node + 1 :]), late=late)


def again(state: State) -> State:
    """Undo the lead's own part, end every connection, and begin the next attempt or give up."""
    for node in range(1, len(state.parts)):
        if state.linked[node]:
            state = lose(state, node)
    state = replace(put(state, 0, Part()), pc="build", told=frozenset(), running=False)
    if state.attempt == MAX_ATTEMPTS:
        return replace(state, lead="held")
    attempt = state.attempt + 1
    return replace(state, lead="alive", attempt=attempt, linked=(attempt,) * len(state.parts))


def steps(state: State, rules: Rules, max_faults: int) -> Iterator[State]:
    """Every state that can come next."""
    yield from node_steps(state)
    if state.lead == "alive" and state.pc != "done":
        yield from lead_steps(state, rules)
    if state.lead == "dead":
        keeps = state.running or (not rules.all_anew and state.parts[0].state == BACK)
        yield replace(state, lead="alive", pc="done", running=True) if keeps else again(state)
    if state.faults < max_faults:
        failed = replace(state, faults=state.faults + 1)
        for node in range(1, len(state.parts)):
            if state.linked[node] and state.lead == "alive":
                yield lose(failed, node)
        if state.lead == "alive":
            dead = failed
            for node in range(1, len(state.parts)):
                if state.linked[node]:
                    dead = lose(dead, node)
            yield replace(dead, lead="dead")
            yield replace(put(dead, 0, Part()), lead="over")


def lead_steps(state: State, rules: Rules) -> Iterator[State]:
    nodes = range(len(state.parts))
    wanted = [n for n in nodes if not (state.pc == "open" and n == 0 and rules.lead_last)]
    enough = len(wanted) if rules.barrier or state.pc != "run" else 1
    if len(state.told) >= enough:
        if state.pc != "open":
            yield replace(state, pc=PHASES[PHASES.index(state.pc) + 1], told=frozenset())
        else:
            own = replace(state.parts[0], state=OPEN)
            yield replace(put(state, 0, own), pc="done", running=True)
        return
    for node in wanted:
        if node in state.told:
            continue
        if not state.linked[node]:
            yield again(state)
            continue
        told = replace(state, told=state.told | {node})
        part = state.parts[node]
        if state.pc == "build":
            kept = not rules.clear and part.state in (BACK, OPEN)
            yield put(told, node, part if kept else Part(BUILT, state.attempt))
            yield again(state)  # no room, another processor, a damaged image
        elif state.pc == "run":
            back = part if part.state in (BACK, OPEN) else Part(BACK, part.attempt, state.attempt)
            if part.state == NONE:
                yield again(state)
                continue
            yield put(told, node, back)
            if not rules.launches and state.attempt > 1:
                yield put(told, node, replace(back, srun=state.attempt - 1))
            yield again(state)  # CRIU fails, a step does not start
        else:
            opened = put(told, node, replace(part, state=OPEN)) if part.state != NONE else again(state)
            yield replace(opened, running=True) if node == 0 and part.state != NONE else opened


def node_steps(state: State) -> Iterator[State]:
    """A node notices that a connection of some attempt has ended; or, by Slurm's word, that the job is not here."""
    for node, attempt in state.late:
        seen = replace(state, late=state.late - {(node, attempt)})
        part = state.parts[node]
        hit = part.state in (BUILT, BACK) and part.attempt == attempt
        yield put(seen, node, Part()) if hit else seen
    if state.lead in ("held", "over"):
        for node in range(1, len(state.parts)):
            if state.parts[node].state == OPEN:
                yield put(state, node, Part())


def violations(state: State, *, final: bool) -> Iterator[str]:
    running = [p for p in state.parts if p.state in (BACK, OPEN)]
    if any(p.srun != p.attempt for p in running):
        yield "a task belongs to an srun that was given up"
    opened = [p for p in state.parts if p.state == OPEN]
    current = [p for p in opened if p.attempt == state.attempt]
    undisturbed = state.lead == "alive" and state.pc != "build" and state.faults == 0
    if undisturbed and current and any(p.state not in (BACK, OPEN) for p in state.parts):
        yield "a network was open before every tree was back"
    if not final:
        return
    if state.lead == "alive" and state.pc == "done":
        if any(p.state != OPEN for p in state.parts):
            yield "the job runs without one of its parts"
        if len({p.attempt for p in state.parts}) > 1:
            yield "parts of different attempts run together"
    if state.lead in ("held", "over") and any(p.state != NONE for p in state.parts):
        yield "a part is left of a run that is over"


def explore(nodes: int, rules: Rules, max_faults: int) -> tuple[int, list[str], set[str]]:
    """Number of states, every violation found, and the ways in which it ended."""
    start = initial(nodes)
    seen, todo, bad, ends = {start}, [start], set(), set()
    while todo:
        state = todo.pop()
        final = not list(steps(state, rules, 0))
        bad |= set(violations(state, final=final))
        if final:
            ends.add("done" if state.lead == "alive" else state.lead)
        for after in steps(state, rules, max_faults):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), sorted(bad), ends


@pytest.mark.parametrize(("nodes", "faults"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2)])
def test_all_parts_of_one_attempt_run_or_none(nodes: int, faults: int) -> None:
    """Whatever dies and whenever: in the end the whole job runs, or nothing of it and its set is kept."""
    states, bad, ends = explore(nodes, Rules(), faults)
    assert states > 10 * nodes
    assert bad == []
    assert ends == {"done", "held", "over"} if faults else {"done", "held"}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(barrier=False), "a network was open before every tree was back"),
        (Rules(lead_last=False), "the job runs without one of its parts"),
        (Rules(all_anew=False), "the job runs without one of its parts"),
        (Rules(clear=False), "parts of different attempts run together"),
        (Rules(launches=False), "a task belongs to an srun that was given up"),
    ],
)
def test_weaker_protocols_are_found_out(rules: Rules, expected: str) -> None:
    """The model is able to fail: without a rule the state that the rule prevents is reached."""
    assert expected in explore(3 if rules.barrier is False else 2, rules, 2)[1]
