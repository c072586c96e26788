"""A pool, a queue, a semaphore and a block of shared memory, used by several processes until the end."""

import multiprocessing as mp
import struct
import sys
import time
from multiprocessing import shared_memory


def square(task: tuple[int, float]) -> int:
    number, pause_s = task
    time.sleep(pause_s)
    return number * number


def count(queue: "mp.Queue[int]", lock: "mp.synchronize.Semaphore", name: str) -> None:
    """Add every number of the queue to a counter in shared memory, under the semaphore; -1 ends."""
    block = shared_memory.SharedMemory(name=name)
    while (number := queue.get()) >= 0:
        with lock:
            (total,) = struct.unpack_from("q", block.buf)
            struct.pack_into("q", block.buf, 0, total + number)
    block.close()


def main() -> None:
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    block = shared_memory.SharedMemory(create=True, size=8)
    lock, queue = mp.Semaphore(1), mp.Queue()
    counters = [mp.Process(target=count, args=(queue, lock, block.name)) for _ in range(2)]
    for counter in counters:
        counter.start()
    with mp.Pool(3) as pool:
        for done, value in enumerate(pool.imap(square, ((n, pause_s) for n in range(tasks)))):
            queue.put(value)
            if done % 20 == 0:
                print(f"{done} of {tasks}", flush=True)
    for _ in counters:
        queue.put(-1)
    for counter in counters:
        counter.join()
    (total,) = struct.unpack_from("q", block.buf)
    block.close()
    block.unlink()
    expected = sum(n * n for n in range(tasks))
    print("RESULT", total)
    if total != expected or any(c.exitcode for c in counters):
        raise SystemExit(f"wrong: expected {expected}, exit codes {[c.exitcode for c in counters]}")


if __name__ == "__main__":
    main()
