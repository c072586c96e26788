"""Train a small network on GPUs, deterministically, and check that nothing was lost on the way.

    python3 pytorch_train.py --log train.log --steps 200            one GPU
    WORLD_SIZE=2 RANK=0 ... python3 pytorch_train.py ...            several, by DistributedDataParallel and NCCL

Nothing in it knows of checkpoints. Each step appends its loss, in full precision, to the log: a run that was moved has
the same log as one that was not. --gib fills GPU memory with random bytes whose sum is taken at the start and at the
end. With --check the training is run again at the end, in the same process, and the losses are compared.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fill(gib: float) -> torch.Tensor:
    """Random memory on the GPU, in one piece."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    count = int(gib * (1 << 30)) // 8
    return torch.randint(-(1 << 62), 1 << 62, (count,), device="cuda", dtype=torch.int64, generator=generator)


def losses(steps: int, width: int, ranks: int, rank: int, pause: float):
    """The losses of a training from its beginning, one by one."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh()))).cuda()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.Generator(device="cuda").manual_seed(100 + rank)
    for _ in range(steps):
        x = torch.randn(256, width, device="cuda", generator=data)
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
        time.sleep(pause)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log", default="train.log")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--gib", type=float, default=0.0, help="more GPU memory to hold")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--check", action="store_true", help="train again and compare")
    args = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        torch.distributed.init_process_group("nccl")
    memory = fill(args.gib)
    before = memory.sum().item()
    found = []
    with open(args.log, "a", buffering=1) as log:
        for step, loss in enumerate(losses(args.steps, args.width, ranks, rank, args.pause)):
            found.append(loss)
            log.write(f"{step} {loss.hex()}\n")
        good = memory.sum().item() == before
        if args.check:
            good = good and found == list(losses(args.steps, args.width, ranks, rank, 0.0))
        log.write("passed\n" if good else "failed\n")
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
