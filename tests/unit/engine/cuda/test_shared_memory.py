"""What a job's processes share of GPU memory, and what must go before they can be saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.engine.cuda import preflight
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.inventory import Gpu, Inventory
from gpucr_hpc.engine.nccl.node import Covered

PROTECTED, UNPROTECTED = Covered(""), Covered("a CUDA graph holds NCCL operations")
SAFE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


class Node:
    """GPU processes 11, 12, ... by what /proc would say of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *of: dict[str, Any]) -> None:
        self.of = {11 + number: one for number, one in enumerate(of)}
        self.processes = [SimpleNamespace(pid=pid, nspid=pid - 10, name="python3") for pid in self.of]
        self.inventory = Inventory("580.1", (Gpu(0, "GPU-0", "Fake H100", 0, 1 << 36, 0),))
        monkeypatch.setattr(procfs, "listens", lambda pid: self.of[pid].get("listens", True))
        monkeypatch.setattr(procfs, "environment", lambda pid: self.of[pid].get("env", {}))
        monkeypatch.setattr(procfs, "nccl_linked_in", lambda pid: self.of[pid].get("inside", ""))
        monkeypatch.setattr(
            procfs,
            "maps_library",
            lambda pid, name: any(lib.startswith(name) for lib in self.of[pid].get("maps", ["libnccl.so.2"])),
        )

    def seen(self) -> list[Gpu]:
        return []

    def check(self, covered: dict[int, Covered]) -> tuple[list[str], bool]:
        """What is found, and whether the communicators must be taken away."""
        gpus: Any = self
        found = preflight.check(gpus, [], covered)
        return [finding.what for finding in found], preflight.must_be_rebuilt(gpus, covered)


def test_ranks_of_one_node_are_let_through_if_their_communicators_go(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, {}, {})
    assert node.check({11: PROTECTED, 12: PROTECTED}) == ([], True)
    found, needed = node.check({11: PROTECTED, 12: UNPROTECTED})
    assert (len(found), "CUDA graph" in found[0], needed) == (1, True, True)
    found, needed = node.check({})
    assert (len(found), "--checkpoint-nccl=safe" in found[0], needed) == (2, True, False)


def test_ranks_on_one_card_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that share no memory: what they fail of after a checkpoint is not known."""
    one, other = Covered("", cards=frozenset({"a", "b"})), Covered("", cards=frozenset({"b"}))
    for env in ({}, SAFE):
        node = Node(monkeypatch, {"env": env}, {"env": env}, {"env": env})
        found, _ = node.check({11: one, 12: other, 13: Covered("", cards=frozenset({"c"}))})
        assert ["share a card" in what for what in found] == [True, True]
        assert node.check({11: one, 12: PROTECTED, 13: PROTECTED})[0] == []


def test_ranks_that_share_nothing_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets, or alone on their node: the images are good with their communicators, too."""
    assert Node(monkeypatch, {"env": SAFE}, {"env": SAFE}).check({11: PROTECTED, 12: UNPROTECTED}) == ([], False)
    assert Node(monkeypatch, {}).check({11: UNPROTECTED}) == ([], False)
    assert Node(monkeypatch, {}, {"listens": False}).check({11: PROTECTED}) == ([], False)


def test_nccl_inside_of_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = Node(monkeypatch, {}, {"maps": [], "inside": "/opt/solver"}).check({11: PROTECTED})
    assert ["/opt/solver" in what for what in found] == [True]


def test_memory_that_a_program_shares_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is enough: who has the other end need not use a GPU yet."""
    shares = Covered("", "it has called cudaIpcGetMemHandle")
    found, _ = Node(monkeypatch, {"listens": False}).check({11: shares})
    assert ["cudaIpcGetMemHandle" in what for what in found] == [True]


@pytest.mark.parametrize(("library", "count"), [("nvshmem_bootstrap_uid.so.3", 1), ("libnvshmem_host.so.3", 0)])
def test_nvshmem_is_named_when_it_is_used(monkeypatch: pytest.MonkeyPatch, library: str, count: int) -> None:
    """Its library is in every process of PyTorch."""
    found, _ = Node(monkeypatch, {"maps": [library], "listens": False}).check({})
    assert [what for what in found if "NVSHMEM" in what] == found
    assert count == len(found)
