"""Small GPU programs; each appends to train.log in its working directory and ends by itself."""

TRAIN = "exec {python} {root}/examples/pytorch_train.py {args} >>out 2>>err\n"

# Managed memory, touched by both sides.
MANAGED = """
import ctypes, time, torch
torch.zeros(1, device="cuda")
lib = ctypes.CDLL("libcuda.so.1")
p = ctypes.c_uint64()
assert lib.cuMemAllocManaged(ctypes.byref(p), ctypes.c_size_t(64 << 20), 1) == 0
ctypes.memset(p.value, 7, 64 << 20)
log = open("train.log", "a", buffering=1)
for step in range(600):
    assert lib.cuMemsetD8_v2(p, step % 200, ctypes.c_size_t(1 << 20)) == 0
    torch.cuda.synchronize()
    assert ctypes.string_at(p.value, 1)[0] == step % 200
    log.write(f"{step}\\n")
    time.sleep(0.05)
log.write("passed\\n")
"""

# Children forked after CUDA was begun, as PyTorch's DataLoader does by default.
LOADER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 100000
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((8,), float(i))
if __name__ == "__main__":
    x = torch.ones(8, device="cuda")
    log = open("train.log", "a", buffering=1)
    for step, rows in enumerate(DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="CONTEXT")):
        log.write(f"{step} {(rows.cuda() @ x).sum().item()}\\n")
        if step == 400: break
    log.write("passed\\n")
"""

# A process that begins to use the GPU when it finds the file `now`, with a child of its own.
LATE = """
import os, subprocess, sys, time
log = open("train.log", "a", buffering=1)
while not os.path.exists("now"):
    log.write("waits\\n")
    time.sleep(0.05)
subprocess.run([sys.executable, "-c", '''
import time, torch
x = torch.arange(1 << 20, device="cuda")
log = open("train.log", "a", buffering=1)
for step in range(300):
    x += 1
    log.write(f"{step} {x[0].item()}\\\\n")
    time.sleep(0.02)
log.write("passed\\\\n" if x[5].item() == 305 else "failed\\\\n")
'''], check=True)
"""

# One kernel of two seconds after the other: a lock with a short limit meets work under way, then a gap.
LONG_KERNELS = """
import time, torch
torch.zeros(1, device="cuda")
log = open("train.log", "a", buffering=1)
rate = 1_500_000_000
for step in range(40):
    torch.cuda._sleep(2 * rate)
    torch.cuda.synchronize()
    log.write(f"{step}\\n")
    time.sleep(0.1)
log.write("passed\\n")
"""

# Memory of the GPU taken by somebody else: GIB of it, until it is killed.
HOG = """
import sys, time, torch
x = torch.empty(int(float(sys.argv[1]) * (1 << 30)), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
time.sleep(3600)
"""

CUPY = """
import time, cupy
x = cupy.arange(1 << 24, dtype=cupy.float64)
log = open("train.log", "a", buffering=1)
for step in range(200):
    x = cupy.sqrt(x * x + 1)
    log.write(f"{step} {float(x.sum()).hex()}\\n")
    time.sleep(0.02)
log.write("passed\\n")
"""

JAX = """
import time, jax, jax.numpy as jnp
step_of = jax.jit(lambda x: jnp.sin(x @ x.T) + x)
x = jax.random.normal(jax.random.key(1), (1024, 1024))
log = open("train.log", "a", buffering=1)
for step in range(200):
    x = step_of(x)
    log.write(f"{step} {float(x.sum()).hex()}\\n")
    time.sleep(0.02)
log.write("passed\\n")
"""

# No card: counts, holds "GPU memory", has a file named as the driver's library mapped.
FAKE = """
import mmap, threading, time
file = open("libcuda.so.fake", "w+b"); file.write(b"x" * 4096); file.flush()
held = mmap.mmap(file.fileno(), 4096)
memory = bytearray(b"g" * (32 << 20))
def driver():
    log = open("driver.log", "a", buffering=1)
    while True:
        log.write("alive\\n")
        time.sleep(0.02)
threading.Thread(target=driver, daemon=True).start()
log = open("train.log", "a", buffering=1)
for step in range(STEPS):
    log.write(f"{step} {memory[step]}\\n")
    time.sleep(0.02)
log.write("passed\\n")
"""

# The same with a driver that makes MIB of host memory, all of it zero at first, and fills it in order (fake.py).
FAKE_COPY = """
import mmap, os, random, threading, time, zlib
file = open("libcuda.so.fake", "w+b"); file.write(b"x" * 4096); file.flush()
held = mmap.mmap(file.fileno(), 4096)
def out(order):
    memory = mmap.mmap(-1, MIB << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(memory), 4096):
        memory[at] = 0
    bits = random.Random(order)
    for at in range(0, len(memory), 2 << 20):
        memory[at:at + (2 << 20)] = bits.randbytes(2 << 20)
    return memory, zlib.crc32(memory)
def driver():
    done, memory, sum = "", None, 0
    while True:
        order = open("copy").read() if os.path.exists("copy") else ""
        if order != done:
            if order.startswith("out"):
                memory, sum = out(order)
            else:
                open("contents", "a").write("same\\n" if zlib.crc32(memory) == sum else "other\\n")
                memory = None
            open("copied.new", "w").write(order)
            os.rename("copied.new", "copied")
            done = order
        time.sleep(0.01)
threading.Thread(target=driver, daemon=True).start()
log = open("train.log", "a", buffering=1)
step = 0
while not os.path.exists("stop"):
    log.write(f"{step}\\n")
    step += 1
    time.sleep(0.02)
log.write("passed\\n")
"""

# Bus bandwidth of an all-reduce of 1 GiB over two ranks, GB/s; RANK and the rest come by the environment.
ALL_REDUCE = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.rand(1 << 28, device="cuda")
def seconds(times):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / times
seconds(2)
found = sorted(seconds(1) for _ in range(7))
if rank == 0:
    print(f"{x.numel() * 4 / found[3] / 1e9:.2f}", file=open("bandwidth", "a"))
dist.destroy_process_group()
"""

# Bursts of training steps, one for each line that arrives in `turns`; seconds of each burst to `bursts`.
# argv: rows, width and depth of the network, steps of a burst.
BURSTS = """
import sys, time, torch
rows, width, depth, steps = map(int, sys.argv[1:])
torch.manual_seed(1)
parts = (part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU()))
model = torch.nn.Sequential(*parts).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(rows, width, device="cuda")
def burst():
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    loss.item()
    return time.perf_counter() - began
burst(), burst()
log = open("bursts", "a", buffering=1)
log.write("ready\\n")
for line in open("turns"):
    log.write(f"{burst()}\\n")
"""

# One rank with several communicators: one split off, one made and one destroyed on the way, an operator of its own, a
# send to itself. Values of each step to train.log.
NCCL_GROUPS = """
import os, time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch, torch.distributed as dist
torch.use_deterministic_algorithms(True)
device = torch.device("cuda:0")
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
split, made = dist.split_group(split_ranks=[[0]]), dist.new_group([0])
generator = torch.Generator(device="cuda").manual_seed(3)
weights = torch.randn(512, 512, device="cuda", generator=generator)
log = open("train.log", "a", buffering=1)
for step in range(800):
    x = torch.randn(512, 512, device="cuda", generator=generator)
    dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=split)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5), group=made)
    y = torch.empty_like(x)
    dist.all_gather_into_tensor(y, x, group=split)
    dist.reduce_scatter_tensor(x, y)
    dist.broadcast(x, 0, group=made)
    weights = torch.tanh(weights @ x / 512) + weights * 0.5
    log.write(f"{step} {weights.sum().item().hex()}\\n")
    if step % 60 == 59:
        dist.destroy_process_group(made)
        made = dist.new_group([0])
    time.sleep(0.03)
log.write("passed\\n")
dist.destroy_process_group()
"""

NCCL_CUPY = """
import time, cupy
from cupy.cuda import nccl
comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
x = cupy.arange(1 << 20, dtype=cupy.float64)
y = cupy.empty_like(x)
log = open("train.log", "a", buffering=1)
for step in range(600):
    comm.allReduce(x.data.ptr, y.data.ptr, x.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr)
    x = cupy.sqrt(y * y + 1)
    log.write(f"{step} {float(x.sum()).hex()}\\n")
    time.sleep(0.03)
log.write("passed\\n")
"""

# One rank that captures an NCCL operation in a CUDA graph, offers a tensor to other processes, or captures graphs
# without NCCL again and again; for ever.
NCCL_WAYS = """
import time, torch, torch.distributed as dist
device = torch.device("cuda:0")
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
x = torch.ones(1024, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
graph = captured(lambda: dist.all_reduce(x)) if "WAY" == "graph" else captured(lambda: x.add_(1))
handle = x.untyped_storage()._share_cuda_() if "WAY" == "tensor" else None
log = open("train.log", "a", buffering=1)
step = 0
while True:
    if "WAY" == "captures":
        graph = captured(lambda: [x.add_(1) for _ in range(200)])
    graph.replay()
    torch.cuda.synchronize()
    log.write(f"{step} {x.sum().item()}\\n")
    step += 1
    time.sleep(0.02)
"""

# A training whose parameters are split over all ranks; argv: steps. RANK and the rest come by the environment.
FSDP = """
import os, sys, time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
rank = int(os.environ["RANK"])
torch.use_deterministic_algorithms(True)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(1)
model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.Tanh()))).cuda()
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.Generator(device="cuda").manual_seed(100 + rank)
log = open(f"train-{rank}.log", "a", buffering=1)
for step in range(int(sys.argv[1])):
    x = torch.randn(256, 1024, device="cuda", generator=data)
    loss = (model(x) - x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.write(f"{step} {loss.item().hex()}\\n")
    time.sleep(0.05)
log.write("passed\\n")
dist.destroy_process_group()
"""

# Bus bandwidth of an all-reduce of 1 GiB again and again, GB/s, by rank 0 to `bandwidth`; for ever.
BANDWIDTH = """
import os, torch, torch.distributed as dist
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.rand(1 << 28, device="cuda")
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
log = open("bandwidth", "a", buffering=1) if rank == 0 else None
while True:
    begin.record()
    for _ in range(4):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
    end.record()
    end.synchronize()
    if log:
        log.write(f"{2 * (ranks - 1) / ranks * x.numel() * 4 * 4 / begin.elapsed_time(end) / 1e6:.3f}\\n")
"""

# Training steps over several cards, in bursts: each when the next number is in the file `turn`.
DDP_BURSTS = """
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(1)
layers = (m for _ in range(8) for m in (nn.Linear(4096, 4096), nn.Tanh()))
model = DistributedDataParallel(nn.Sequential(*layers).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(2048, 4096, device="cuda")
def train(count):
    for _ in range(count):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
train(5)
log = open("bursts", "a", buffering=1) if rank == 0 else None
if rank == 0:
    open("ready", "w").write("ready\\n")
turn = 0
while True:
    while not (os.path.exists("turn") and open("turn").read() == str(turn)):
        time.sleep(0.005)
    turn += 1
    train(3)
    begin = time.perf_counter()
    train(20)
    if log:
        log.write(f"{(time.perf_counter() - begin) * 50:.4f}\\n")
"""
