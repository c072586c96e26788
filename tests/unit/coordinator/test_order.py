"""The order of a checkpoint over several nodes, with participants that refuse a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest

from gpucr_hpc.coordinator import checkpoint as coordinator
from gpucr_hpc.coordinator.checkpoint import Budget, Timings, checkpoint
from gpucr_hpc.errors import CutNotPossible, DeadlineExceeded, GpucrError

PHASES = ("prepare", "gpu_lock", "lock", "capture")
STAYING = (*PHASES, "resume", "seal")
BEFORE_THE_COMMIT = [*((phase, True) for phase in PHASES), *((phase, False) for phase in STAYING)]


class Node:
    """A participant that is a state machine: it fails the test when it is asked for something out of turn."""

    ORDER: ClassVar = {
        "prepare": ("new",),
        "gpu_lock": ("prepare",),
        "lock": ("gpu_lock",),
        "capture": ("lock",),
        "resume": ("capture",),
        "seal": ("resume",),
        "commit": ("capture",),
        "finish": ("commit", "seal"),
    }

    def __init__(self, name: str, journal: list[str], fail: str = "", hang: str = "") -> None:
        self.name, self.journal, self.fail, self.hang = name, journal, fail, hang
        self.state = "new"
        self.busy = 0
        self.all: list[Node] = []
        self.reached: set[str] = set()

    async def _phase(self, phase: str) -> None:
        assert self.state in self.ORDER[phase], f"{self.name}: {phase} after {self.state}"
        self.state = f"in {phase}"
        self.journal.append(f"{self.name} {phase}")
        await asyncio.sleep(0)
        if phase == self.hang:
            await asyncio.sleep(60)
        if phase == self.fail:
            raise GpucrError(reason=f"{self.name} cannot {phase}")
        self.state = phase
        self.reached.add(phase)

    async def prepare(self) -> None:
        await self._phase("prepare")

    async def gpu_lock(self) -> None:
        if self.busy:
            self.busy -= 1
            self.journal.append(f"{self.name} busy")
            raise CutNotPossible(job="7", reason=f"{self.name} is busy")
        await self._phase("gpu_lock")

    async def gpu_unlock(self) -> None:
        assert self.state in ("prepare", "gpu_lock", "in gpu_lock"), self.state
        self.journal.append(f"{self.name} gpu_unlock")
        self.state = "prepare"

    async def lock(self) -> None:
        await self._phase("lock")

    async def capture(self) -> None:
        await self._phase("capture")

    async def resume(self) -> None:
        assert all("capture" in node.reached for node in self.all), "the images would not be of one moment"
        await self._phase("resume")

    async def seal(self) -> None:
        await self._phase("seal")

    async def commit(self) -> None:
        await self._phase("commit")

    async def finish(self) -> None:
        await self._phase("finish")

    async def undo(self) -> None:
        assert "finish" not in self.reached
        assert self.state != "undone"
        self.state = "undone"
        self.journal.append(f"{self.name} undo")


class Shared:
    """What all nodes share, a state machine as they are: gone while GPUs and networks are locked, back when all run."""

    def __init__(self, nodes: list[Node], journal: list[str], fail: bool = False, hang: bool = False) -> None:
        self.nodes, self.journal, self.fail, self.hang = nodes, journal, fail, hang
        self.there = True

    async def take(self, left_s: float) -> None:
        assert self.there
        assert {"prepare"} == {node.state for node in self.nodes}
        assert 0 < left_s <= 10
        self.journal.append("take")
        self.there = False
        if self.hang:
            await asyncio.sleep(60)
        if self.fail:
            raise GpucrError(reason="cannot take")

    async def give_back(self) -> None:
        assert {node.state for node in self.nodes} in ({"undone"}, {"resume"}), "all trees run, and no longer"
        if not self.there:
            self.journal.append("give back")
        self.there = True


class Case:
    """Two nodes, a publication and a requeue, all written down in one journal."""

    def __init__(self, *, fail: str = "", hang: str = "") -> None:
        """fail, hang: such as "b lock", "publish" or "leave"."""
        self.journal: list[str] = []

        def of(name: str, fault: str) -> str:
            return fault.removeprefix(f"{name} ") if fault.startswith(f"{name} ") else ""

        self.nodes = [Node(name, self.journal, of(name, fail), of(name, hang)) for name in "ab"]
        for node in self.nodes:
            node.all = self.nodes
        self.fail, self.hang, self.staying = fail, hang, False
        self.timings = Timings()
        self.shared: Shared | None = None

    def step(self, name: str) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            reached = {"publish": "seal" if self.staying else "capture", "leave": "commit"}[name]
            assert {reached} == {node.state for node in self.nodes}, "only a whole set may be committed"
            self.journal.append(name)
            if self.hang == name:
                await asyncio.sleep(60)
            if self.fail == name:
                raise GpucrError(reason=f"cannot {name}")

        return work

    def agree(self) -> None:
        assert {"lock"} == {node.state for node in self.nodes}, "the cut is judged when all are locked"
        if self.fail == "agree":
            raise GpucrError(reason="cannot agree")

    def share(self, **faults: bool) -> Shared:
        """Let the nodes share something."""
        self.shared = Shared(self.nodes, self.journal, **faults)
        return self.shared

    async def take(self, *, leave: bool = True, limit_s: float = 10.0) -> None:
        self.staying = not leave
        await checkpoint(
            self.nodes,
            Budget("7", limit_s),
            agree=self.agree,
            publish=self.step("publish"),
            leave=self.step("leave") if leave else None,
            timings=self.timings,
            quiesce=self.shared,
        )

    def run(self, *, leave: bool = True, limit_s: float = 10.0) -> list[str]:
        asyncio.run(self.take(leave=leave, limit_s=limit_s))
        return self.journal


def test_every_node_reaches_a_phase_before_the_next():
    journal = Case().run()
    captured = [f"{node} {phase}" for phase in PHASES for node in "ab"]
    assert [*captured, "publish", "a commit", "b commit", "leave"] == journal[:12]
    assert {"a finish", "b finish"} == set(journal[12:])


def test_staying_job_is_not_requeued():
    """It runs on before its images are sealed, and nothing is left to be done at the commit."""
    case = Case()
    journal = case.run(leave=False)
    assert [f"{node} {phase}" for phase in STAYING for node in "ab"] == journal[:12]
    assert ["publish", {"a finish", "b finish"}] == [journal[12], set(journal[13:])]
    assert [*STAYING, "commit", "finish"] == list(case.timings.phases)


def test_phases_are_timed():
    case = Case()
    case.run()
    assert [*PHASES, "commit", "requeue", "finish"] == list(case.timings.phases)
    assert all(0 <= seconds < 5 for seconds in case.timings.phases.values())


@pytest.mark.parametrize(("phase", "leave"), BEFORE_THE_COMMIT)
@pytest.mark.parametrize("node", "ab")
def test_failure_of_a_node_undoes_all(node, phase, leave):
    """Before the commit every node goes back, whichever failed and whenever; nothing is published."""
    case = Case(fail=f"{node} {phase}")
    with pytest.raises(GpucrError, match=f"{node} cannot"):
        case.run(leave=leave)
    assert {"a undo", "b undo"} == set(case.journal[-2:])
    assert {"publish", "leave"}.isdisjoint(case.journal)
    later = STAYING[STAYING.index(phase) + 1 :]
    assert not [line for line in case.journal if line[2:] in later], "no node goes on to a later phase"


def test_gpus_that_are_busy_let_all_go_and_are_tried_again():
    """No network is locked before every GPU is held: a collective over it would never end."""
    case = Case()
    case.nodes[1].busy = 3
    journal = case.run()
    assert 3 == journal.count("b busy") == journal.count("a gpu_unlock") == journal.count("b gpu_unlock")
    assert journal.index("a lock") > max(i for i, line in enumerate(journal) if line == "b busy")
    assert "publish" in journal


def test_gpus_that_never_come_to_rest(monkeypatch):
    """The cut is given up, with its reason, and the job runs on."""
    monkeypatch.setattr(coordinator, "_HOLD_ATTEMPTS", 2)
    case = Case()
    case.nodes[0].busy = 99
    with pytest.raises(CutNotPossible, match="a is busy"):
        case.run()
    assert {"a undo", "b undo"} == set(case.journal[-2:])
    assert "a lock" not in case.journal


def test_serious_failure_of_a_gpu_is_not_tried_again():
    case = Case(fail="a gpu_lock")
    case.nodes[1].busy = 5
    with pytest.raises(GpucrError, match="a cannot gpu_lock"):
        case.run()
    assert 1 == case.journal.count("b busy")


@pytest.mark.parametrize("step", ["publish", "leave"])
def test_failure_of_commit_or_requeue_undoes_all(step):
    """A checkpoint that is not published does not exist; when the requeue fails it stays, and the job runs on."""
    case = Case(fail=step)
    with pytest.raises(GpucrError, match=f"cannot {step}"):
        case.run()
    assert (step, {"a undo", "b undo"}) == (case.journal[-3], set(case.journal[-2:]))


@pytest.mark.parametrize(
    ("hang", "phase", "leave"),
    [
        *((f"{node} {phase}", phase, leave) for node in "ab" for phase, leave in BEFORE_THE_COMMIT),
        *(("publish", "commit", leave) for leave in (True, False)),
    ],
)
def test_deadline_undoes_all(hang, phase, leave):
    """Time that runs out names the phase, and the job runs on."""
    case = Case(hang=hang)
    with pytest.raises(DeadlineExceeded, match=f"{phase} was not done within 0.6 s"):
        case.run(limit_s=0.6, leave=leave)
    assert {"a undo", "b undo"} == set(case.journal[-2:])


def test_spent_budget_begins_nothing_that_it_cannot_end():
    with pytest.raises(DeadlineExceeded, match="prepare"):
        Case().run(limit_s=0.0)


def test_failure_of_one_node_stops_the_others_phase():
    """Undo never runs beside a phase that still works."""
    case = Case(fail="a capture", hang="b capture")
    with pytest.raises(GpucrError, match="a cannot capture"):
        case.run()
    assert {"a undo", "b undo"} == set(case.journal[-2:])


def test_a_node_that_cannot_finish_is_left_behind():
    """After the requeue there is no way back: the others end their trees, and it is no failure of the checkpoint."""
    journal = Case(fail="b finish").run()
    assert {"a finish", "b finish"} == set(journal[-2:])


def test_a_node_that_does_not_undo_keeps_no_other_frozen():
    """Every node is told at once."""
    case = Case(fail="a capture")
    held = asyncio.Event()

    async def stuck() -> None:
        case.journal.append("b undo begins")
        await held.wait()

    case.nodes[1].undo = stuck

    async def run() -> None:
        work = asyncio.ensure_future(case.take(leave=False))
        async with asyncio.timeout(5):
            while "a undo" not in case.journal:
                await asyncio.sleep(0.001)
        assert not work.done()
        held.set()
        with pytest.raises(GpucrError, match="a cannot capture"):
            await work

    asyncio.run(run())


def test_what_is_shared_is_away_while_gpus_are_locked():
    """Given back when the job goes on here; a job that leaves gets it back where it is restored."""
    case = Case()
    case.share()
    journal = case.run(leave=False)
    assert max(journal.index("a prepare"), journal.index("b prepare")) < journal.index("take")
    assert journal.index("take") < min(journal.index("a gpu_lock"), journal.index("b gpu_lock"))
    assert journal.index("give back") > max(journal.index("a resume"), journal.index("b resume"))
    assert journal.index("give back") < min(journal.index("a seal"), journal.index("b seal"))
    phases = ["prepare", "quiesce", *PHASES[1:], "resume", "give_back", "seal", "commit", "finish"]
    assert phases == list(case.timings.phases)
    leaving = Case()
    leaving.share()
    assert "give back" not in leaving.run()


@pytest.mark.parametrize(
    ("fault", "leave"),
    [
        *((f"{node} {phase}", leave) for node in "ab" for phase, leave in BEFORE_THE_COMMIT if phase != "prepare"),
        *(("publish", leave) for leave in (True, False)),
        ("leave", True),
    ],
)
def test_what_is_shared_comes_back_after_a_failure(fault, leave):
    """Once, and when all trees run: after all nodes are undone, or before, where the job went on."""
    case = Case(fail=fault)
    shared = case.share()
    with pytest.raises(GpucrError):
        case.run(leave=leave)
    resumed = fault in ("a seal", "b seal") or (fault == "publish" and not leave)
    undone = max(case.journal.index("a undo"), case.journal.index("b undo"))
    assert shared.there
    assert 1 == case.journal.count("give back")
    assert resumed == (case.journal.index("give back") < undone)


@pytest.mark.parametrize(("faults", "error"), [({"fail": True}, GpucrError), ({"hang": True}, DeadlineExceeded)])
def test_what_is_shared_and_cannot_go_undoes_all(faults, error):
    """No GPU is locked then."""
    case = Case()
    case.share(**faults)
    with pytest.raises(error):
        case.run(limit_s=0.6)
    assert case.shared.there
    assert not [line for line in case.journal if "lock" in line]


@pytest.mark.parametrize("phase", STAYING)
def test_cancellation_undoes_all(phase):
    """An agent that is told to stop in the middle, or a job that ends, leaves nothing frozen and nothing published."""
    case = Case(hang=f"b {phase}")

    async def stop() -> None:
        work = asyncio.ensure_future(case.take(leave=False))
        while f"b {phase}" not in case.journal:
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(stop())
    assert {"a undo", "b undo"} == set(case.journal[-2:])
