"""Which cards a job has, and the complete map to those of another node."""

from __future__ import annotations

import pytest

from gpucr_hpc.engine.cuda import inventory
from gpucr_hpc.engine.cuda.driver import uuid_bytes
from gpucr_hpc.engine.cuda.inventory import Gpu, Inventory, allocated, complete_map
from gpucr_hpc.errors import CudaDriverUnusable, CudaMapImpossible
from gpucr_hpc.proc import Result


def cards(letter: str, count: int, name: str = "H100") -> list[Gpu]:
    return [Gpu(i, f"GPU-{letter}{i}", name, i, 80, 0) for i in range(count)]


def uuids(gpus: list[Gpu]) -> list[str]:
    return [gpu.uuid for gpu in gpus]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a3"}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "3"}, [3]),
        ({"SLURM_JOB_GPUS": "0,2-3", "SLURM_STEP_GPUS": "2-3"}, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [0, 1, 2, 3]),
    ],
)
def test_allocation(env, expected):
    """Slurm's list counts the node's cards; with a device cgroup CUDA_VISIBLE_DEVICES counts from 0 again."""
    assert expected == [gpu.index for gpu in allocated(env, cards("a", 4))]


def test_same_cards_need_no_map():
    here = cards("a", 2)
    assert {} == complete_map(here, uuids(here)[:1], here, uuids(here)[:1])


def test_other_card_of_the_same_node_names_both():
    """The driver wants every card that the process saw, used or not."""
    here = cards("a", 2)
    assert {"GPU-a0": "GPU-a1", "GPU-a1": "GPU-a0"} == complete_map(here, ["GPU-a0"], here, ["GPU-a1"])


def test_other_node():
    found = complete_map(cards("a", 4), ["GPU-a2", "GPU-a3"], cards("b", 4), ["GPU-b0", "GPU-b1"])
    assert ("GPU-b0", "GPU-b1") == (found["GPU-a2"], found["GPU-a3"])
    assert {"GPU-b2", "GPU-b3"} == {found["GPU-a0"], found["GPU-a1"]}


def test_device_cgroup_hides_the_rest():
    assert {"GPU-a1": "GPU-b7"} == complete_map(cards("a", 2)[1:], ["GPU-a1"], cards("b", 8), ["GPU-b7"])


@pytest.mark.parametrize(
    ("old", "new", "given", "reason"),
    [
        (cards("a", 1), cards("b", 1, "A100"), 1, "ran on H100, here is A100"),
        (cards("a", 2), cards("b", 2), 1, "had 2 GPUs and has now 1"),
        (cards("a", 4), cards("b", 2), 2, "saw 4 GPUs, this node has 2"),
    ],
)
def test_refused_with_the_reason(old, new, given, reason):
    with pytest.raises(CudaMapImpossible, match=reason):
        complete_map(old, uuids(old)[:2], new, uuids(new)[:given])


def test_answers_of_nvidia_smi(monkeypatch):
    answers = {
        "--query-gpu": "0, GPU-x, NVIDIA H100 80GB HBM3, 00000000:00:06.0, 81559, 1200, Disabled, 580.159.04\n",
        "--query-compute-apps": "41, 700\n41, 300\n42, [N/A]\n",
    }

    def run(argv, **_how):
        return Result(tuple(argv), 0, next(v for k, v in answers.items() if argv[1].startswith(k)), "", 0.1)

    monkeypatch.setattr(inventory, "run", run)
    found = inventory.read()
    assert ("580.159.04", 580) == (found.driver, found.branch)
    assert {41: 1000 << 20, 42: 0} == found.used
    assert [("GPU-x", 81559 << 20, 1200 << 20, False)] == [
        (g.uuid, g.memory_bytes, g.used_bytes, g.mig) for g in found.gpus
    ]
    assert found == Inventory.from_dict(found.as_dict())


def test_nvidia_smi_that_fails(monkeypatch):
    monkeypatch.setattr(inventory, "run", lambda argv, **_how: Result(tuple(argv), 9, "", "no driver\n", 0.1))
    with pytest.raises(CudaDriverUnusable, match="no driver"):
        inventory.read()


def test_mig_instances_have_no_uuid_for_a_map():
    assert 16 == len(uuid_bytes("GPU-ba24deb1-bff7-1fb6-a19f-8b51167c1c78"))
    with pytest.raises(ValueError, match="whole GPU"):
        uuid_bytes("MIG-ba24deb1-bff7-1fb6-a19f-8b51167c1c78")
