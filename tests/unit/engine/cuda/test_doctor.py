"""What gpucr doctor says of a node's GPUs."""

from __future__ import annotations

import pytest

from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import doctor
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.inventory import Gpu, Inventory


def node(driver: str = "580.159", *, mig: bool = False, mps: bool = False, cards: int = 1) -> Inventory:
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H100", i, 80 << 30, 0, mig) for i in range(cards))
    return Inventory(driver, gpus, mps=mps)


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        (node(), set()),
        (node("570.1"), set()),
        (node("565.9"), {"GPU driver"}),
        (node(mig=True), {"MIG"}),
        (node(mps=True), {"MPS"}),
        (node(cards=0), {"GPUs"}),
    ],
)
def test_what_stands_against_gpu_jobs(found, bad):
    lines = doctor.judge(found, "always [madvise] never\n")
    assert bad == {what for what, good, _, _ in lines if not good}
    assert all(advice for _, good, _, advice in lines if not good)


def test_older_driver_comes_back_on_the_same_cards_only():
    (detail,) = (detail for what, _, detail, _ in doctor.judge(node("570.1"), "") if what == "GPU driver")
    assert "same cards only" in detail


@pytest.mark.parametrize(("switch", "said"), [("[always] madvise", False), ("always [madvise]", True), ("", False)])
def test_huge_pages_are_advice(switch, said):
    lines = doctor.judge(node(), switch)
    assert said == any(what == "huge pages" for what, _, _, _ in lines)
    assert all(good for _, good, _, _ in lines)


def test_node_without_gpus_is_good(monkeypatch):
    monkeypatch.setattr(procfs, "driver_loaded", lambda: False)
    assert [("GPUs", True, "no NVIDIA driver on this node", "")] == doctor.examine(CudaConfig())


def test_driver_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(procfs, "driver_loaded", lambda: True)
    monkeypatch.setenv("PATH", "")
    ((what, good, detail, _),) = doctor.examine(CudaConfig())
    assert (what, good) == ("GPUs", False)
    assert "nvidia-smi" in detail
