"""mpi4py: an allreduce of arrays and a ring of Python objects in each iteration, both checked.

usage: reduce.py [ITERATIONS [SECONDS_PER_ITERATION]]
"""

import hashlib
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    total = np.zeros(1000)
    if rank == 0:
        print("by", MPI.get_vendor()[0], flush=True)
    for step in range(iterations):
        mine = np.arange(1000.0) * (rank + 1) + step
        summed = np.empty_like(mine)
        comm.Allreduce(mine, summed, op=MPI.SUM)
        if not np.array_equal(summed, np.arange(1000.0) * (size * (size + 1) // 2) + step * size):
            print(f"rank {rank}, step {step}: wrong sum", flush=True)
            comm.Abort(1)
        left = (rank - 1) % size
        got = comm.sendrecv({"from": rank, "step": step}, dest=(rank + 1) % size, source=left)
        if got != {"from": left, "step": step}:
            print(f"rank {rank}, step {step}: wrong object {got}", flush=True)
            comm.Abort(1)
        total = np.sin(total + summed)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} of {iterations}", flush=True)
        time.sleep(pause_s)
    MPI.Finalize()
    if rank == 0:
        print("RESULT", hashlib.sha256(total.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
