"""Every way a checkpoint can go, explored: crashes of any agent and loss of any connection at every step.

A model of docs/architecture.md, "A checkpoint of several nodes", small enough to be searched whole for two and three
nodes. It has the lead (a program counter), the nodes (what became of their trees), Slurm (requeued or not) and the
store (published or not). Node 0's tree is the lead's own. The real code's order is checked against real participants in
test_order.py; here the protocol itself is what is tested, and the second half shows that the model can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

# A tree runs, is frozen with its image read ("dumped"), is told that the job leaves ("marked"), or has ended. One that
# goes on is "resumed" with its image in memory, or "sealed" with a durable one.
# What its ranks share with other nodes (NCCL's communicators) is "there", stands at the cut ("drained") or is "gone".
RUNS, LOCKED, DUMPED, MARKED, ENDED = "runs", "locked", "dumped", "marked", "ended"
RESUMED, SEALED = "resumed", "sealed"
AT_WORK = {RUNS, RESUMED, SEALED}
THERE, DRAINED, GONE = "there", "drained", "gone"
LEAVING = ("drain", "destroy", "lock", "capture", "publish", "commit", "requeue", "finish", "done")
STAYING = ("drain", "destroy", "lock", "capture", "resume", "give_back", "seal", "publish", "finish", "done")


@dataclass(frozen=True)
class State:
    """pc: what the lead does next; `told`: nodes that have reached this phase. linked: connection to the lead is up.
    lead: alive, or "undo" while it takes everything back, or "dead"."""

    pc: str
    told: frozenset[int]
    trees: tuple[str, ...]
    linked: tuple[bool, ...]
    lead: str = "alive"
    published: bool = False
    requeued: bool = False
    faults: int = 0
    shared: tuple[str, ...] = ()
    broken: bool = False  # a node has gone on with what another has destroyed


@dataclass(frozen=True)
class Rules:
    """Variants of the protocol; the defaults are what is built."""

    publish_after_all: bool = True  # the commit waits for every image
    ask_slurm: bool = True  # a marked node that loses its lead asks Slurm whether the job has been requeued
    mark: bool = True  # nodes are told that the job leaves before the requeue
    hold: bool = True  # ranks that have drained wait for a word, also when their agent is gone
    back_when_all_run: bool = True  # what is shared does not come back before every tree runs
    stays: bool = False  # the job goes on
    resume_after_all: bool = True  # no tree runs before every one is captured

    @property
    def phases(self) -> tuple[str, ...]:
        return STAYING if self.stays else LEAVING


def initial(nodes: int) -> State:
    return State("drain", frozenset(), (RUNS,) * nodes, (True,) * nodes, shared=(THERE,) * nodes)


def put(values: tuple[str, ...], at: int, value: str) -> tuple[str, ...]:
    return (*values[:at], value, *values[at + 1 :])


def steps(state: State, rules: Rules, max_faults: int) -> Iterator[State]:
    """Every state that can come next."""
    yield from lead_steps(state, rules)
    yield from lonely_steps(state, rules)
    if state.faults < max_faults:
        for node in range(1, len(state.trees)):
            if state.linked[node]:
                linked = (*state.linked[:node], False, *state.linked[node + 1 :])
                yield replace(state, linked=linked, faults=state.faults + 1)
        if state.lead != "dead":
            yield replace(
                state, lead="dead", linked=(True, *(False,) * (len(state.trees) - 1)), faults=state.faults + 1
            )


SHARED = {"drain": DRAINED, "destroy": GONE}
TARGET = {"lock": LOCKED, "capture": DUMPED, "commit": MARKED, "finish": ENDED, "resume": RESUMED, "seal": SEALED}


def lead_steps(state: State, rules: Rules) -> Iterator[State]:
    nodes = range(len(state.trees))
    if state.lead == "undo":
        for node in nodes:
            if state.linked[node] and state.trees[node] in (LOCKED, DUMPED, MARKED, RESUMED, SEALED):
                yield replace(state, trees=put(state.trees, node, RUNS))
        yield from back(state, rules)
        return
    if state.lead != "alive" or state.pc == "done":
        return
    if state.pc == "publish":
        following = "finish" if rules.stays else "commit" if rules.mark else "requeue"
        yield replace(state, pc=following, told=frozenset(), published=True)
        yield replace(state, lead="undo")  # a full or lost store
        return
    if state.pc == "requeue":
        yield replace(state, pc="finish", told=frozenset(), requeued=True)
        yield replace(state, lead="undo")  # Slurm refuses
        return
    if state.pc == "give_back":
        for after in back(state, rules):
            yield replace(after, pc="seal", told=frozenset())
        yield replace(state, lead="undo")  # given up, for the job is about to leave
        return
    early = (state.pc == ("seal" if rules.stays else "capture") and not rules.publish_after_all) or (
        state.pc == "capture" and not rules.resume_after_all
    )
    if len(state.told) >= (1 if early else len(nodes)):
        yield replace(state, pc=rules.phases[rules.phases.index(state.pc) + 1], told=frozenset())
        return
    for node in nodes:
        if node in state.told:
            continue
        if not state.linked[node]:
            if state.pc == "finish":
                yield replace(state, told=state.told | {node})  # it looks after itself
            else:
                yield replace(state, lead="undo")
            continue
        told = replace(state, told=state.told | {node})
        if state.pc in SHARED:
            yield replace(told, shared=put(state.shared, node, SHARED[state.pc]))
        else:
            tree = RUNS if rules.stays and state.pc == "finish" else TARGET[state.pc]
            yield replace(told, trees=put(state.trees, node, tree))
        if state.pc in ("drain", "destroy", "lock", "capture", "resume", "seal"):
            yield replace(state, lead="undo")  # the node says no, or the time is up


def back(state: State, rules: Rules) -> Iterator[State]:
    """The lead, or its next agent, over connections of its own: when all trees run, what is shared comes back on every
    node, after all have destroyed it if one has."""
    all_run = set(state.trees) <= AT_WORK or not rules.back_when_all_run
    if all_run and set(state.shared) != {THERE} and not state.requeued:
        yield replace(state, shared=(THERE,) * len(state.trees))


def lonely_steps(state: State, rules: Rules) -> Iterator[State]:
    """What a node does that has lost its lead; node 0 when its agent has come back after a death."""
    if state.lead == "dead":
        yield from back(state, rules)
    for node, what in enumerate(state.shared):
        alone = (not state.linked[node]) or (node == 0 and state.lead == "dead")
        if alone and what == DRAINED and not rules.hold:
            yield replace(state, shared=put(state.shared, node, THERE), broken=state.broken or GONE in state.shared)
    for node, tree in enumerate(state.trees):
        alone = (not state.linked[node]) or (node == 0 and state.lead == "dead")
        if not alone or tree not in (LOCKED, DUMPED, MARKED, RESUMED, SEALED):
            continue
        leaves = state.requeued if rules.ask_slurm and tree == MARKED else False
        if tree == MARKED and not state.requeued and rules.ask_slurm and state.lead == "alive":
            continue  # Slurm says that the job still runs, and it is asked again while the lead may yet requeue
        yield replace(state, trees=put(state.trees, node, ENDED if leaves else RUNS))


def explore(nodes: int, rules: Rules, max_faults: int) -> tuple[int, list[str]]:
    """Number of states, and every violation found."""
    start = initial(nodes)
    seen, todo, bad = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = list(steps(state, rules, max_faults))
        bad |= set(violations(state, final=not list(steps(state, rules, 0)) and state.faults == max_faults))
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), sorted(bad)


def violations(state: State, *, final: bool) -> Iterator[str]:
    if state.requeued and not state.published:
        yield "requeued without a set"
    if ENDED in state.trees and not (state.published and state.requeued):
        yield "a tree was ended although the job does not come back"
    if RESUMED in state.trees and LOCKED in state.trees and state.lead == "alive" and all(state.linked):
        yield "a tree ran on before every one was captured"
    whole = LOCKED not in state.trees or not all(state.linked) or state.lead != "alive"
    if RESUMED in state.trees and state.published and state.lead == "alive" and all(state.linked):
        yield "published before every image was whole"
    if state.published and state.pc in ("commit", "requeue") and not whole:
        yield "published before every image was whole"
    if state.broken or (THERE in state.shared and GONE in state.shared):
        yield "a rank uses a communicator that another has destroyed"
    if any(tree not in AT_WORK and what != GONE for tree, what in zip(state.trees, state.shared, strict=True)):
        yield "a tree is frozen with something shared"
    if not final:
        return
    if not state.requeued and set(state.shared) != {THERE}:
        yield "communicators stay away for ever"
    if set(state.trees) & {LOCKED, DUMPED, MARKED}:
        yield "a tree stays frozen for ever"
    if set(state.trees) & {RESUMED, SEALED}:
        yield "an image is kept that nobody will publish"
    if state.requeued and RUNS in state.trees:
        yield "a tree runs on although the job goes on elsewhere"
    if not state.requeued and ENDED in state.trees:
        yield "a part of the job is gone"


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(("nodes", "faults"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_nothing_is_lost_and_nothing_runs_twice(nodes: int, faults: int, stays: bool) -> None:
    """Whatever dies and whenever: a whole set before any end, no frozen tree left, no second copy of the job."""
    states, bad = explore(nodes, Rules(stays=stays), faults)
    assert states > 10 * nodes
    assert bad == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(ask_slurm=False), "a tree runs on although the job goes on elsewhere"),
        (Rules(mark=False), "a tree runs on although the job goes on elsewhere"),
        (Rules(publish_after_all=False), "published before every image was whole"),
        (Rules(publish_after_all=False, stays=True), "published before every image was whole"),
        (Rules(resume_after_all=False, stays=True), "a tree ran on before every one was captured"),
        (Rules(hold=False), "a rank uses a communicator that another has destroyed"),
        (Rules(back_when_all_run=False), "a tree is frozen with something shared"),
    ],
)
def test_weaker_protocols_are_found_out(rules: Rules, expected: str) -> None:
    """The model is able to fail: without a rule the state that the rule prevents is reached."""
    assert expected in explore(2, rules, 2)[1]
