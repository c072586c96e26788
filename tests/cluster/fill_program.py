"""A tree with memory of every kind. Arguments: directory for what the processes say, name of the main file.

On SIGUSR2 each process writes `PID.sum`: checksums of its mappings, and whether its threads know their processor.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

place, out = Path(sys.argv[1]), Path(sys.argv[2])
MIB, PAGE = 1 << 20, 4096
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
libc = ctypes.CDLL(None, use_errno=True)
kept: dict[str, tuple[mmap.mmap, int]] = {}


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def protect(memory: mmap.mmap, prot: int) -> None:
    check(libc.mprotect(ctypes.c_void_p(address(memory)), ctypes.c_size_t(len(memory)), prot))


def make(name: str, mib: int, flags: int = PRIVATE, *, apart: bool = True, advice: int | None = None) -> mmap.mmap:
    """Memory full of noise; apart: a page that may not be touched is left behind it, so that it stays a mapping."""
    if apart:
        protect(kept.setdefault(f"gap before {name}", (mmap.mmap(-1, PAGE, flags=PRIVATE), 0))[0], 0)
    memory = mmap.mmap(-1, mib * MIB, flags=flags)
    if advice is not None:
        memory.madvise(advice)
    with open("/dev/urandom", "rb", buffering=0) as noise:
        view = memoryview(memory)
        while view:
            view = view[noise.readinto(view) :]
    kept[name] = (memory, mmap.PROT_READ | mmap.PROT_WRITE)
    return memory


def sums(*_: object) -> None:
    found = {}
    for name, (memory, prot) in kept.items():
        if not prot & mmap.PROT_READ:
            protect(memory, mmap.PROT_READ)
        found[name] = zlib.crc32(memory)
        if not prot & mmap.PROT_READ:
            protect(memory, prot)
    found["stacks"] = [zlib.crc32(stack) for stack in stacks]
    processors.clear()
    turn.set()
    while len(processors) < len(threads):
        time.sleep(0.01)
    turn.clear()
    found["processors"] = processors[:]
    temporary = place / f"{os.getpid()}.new"
    temporary.write_text(json.dumps(found))
    temporary.rename(place / f"{os.getpid()}.sum")


def right_processor() -> bool:
    """What the kernel has put into this thread's rseq area, by way of libc, against what it says by system call."""
    for _ in range(100):
        one, other = libc.sched_getcpu(), ctypes.c_uint()
        libc.syscall(309, ctypes.byref(other), None, None)  # getcpu
        if one == other.value:
            return True
    return False


def work() -> None:
    """A thread with much on its stack."""
    ready.release()
    while True:
        turn.wait()
        processors.append(right_processor())
        while turn.is_set():
            time.sleep(0.01)


def beat() -> None:
    """Says that this process runs."""
    while True:
        (place / f"{os.getpid()}.alive").write_text(str(time.monotonic()))
        time.sleep(0.02)


def start() -> None:
    threading.stack_size(32 * MIB)
    for _ in range(3):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)
        ready.acquire()
    threading.Thread(target=beat, daemon=True).start()
    signal.signal(signal.SIGUSR2, sums)


threads: list[threading.Thread] = []
stacks: list[bytes] = [os.urandom(3 * MIB) for _ in range(2)]  # in the heap, or mappings of malloc
processors: list[bool] = []
ready, turn = threading.Semaphore(0), threading.Event()


def own(mib: int) -> None:
    """Memory that this process has for itself alone."""
    make("own", mib)
    empty = make("zero in places", 16)
    empty[2 * MIB : 9 * MIB] = bytes(7 * MIB)
    empty[11 * MIB : 11 * MIB + PAGE] = bytes(PAGE)
    make("huge", 32, advice=mmap.MADV_HUGEPAGE)
    make("locked", 5)
    check(libc.mlock(ctypes.c_void_p(address(kept["locked"][0])), ctypes.c_size_t(5 * MIB)))
    holes = make("with holes", 16)
    for at in range(0, 16 * MIB, 3 * MIB):
        holes.madvise(mmap.MADV_DONTNEED, at, MIB)
    pieces = make("in more pieces than the kernel tells at once", 8, advice=mmap.MADV_NOHUGEPAGE)
    for at in range(0, 8 * MIB, 2 * PAGE):
        pieces.madvise(mmap.MADV_DONTNEED, at, PAGE)
    for name, prot in (("read only", mmap.PROT_READ), ("not to be touched", 0)):
        make(name, 8)
        protect(kept[name][0], prot)
        kept[name] = (kept[name][0], prot)


shared = make("shared with the child", 24)
make("shared memory", 8, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
make("not for a child", 16, advice=mmap.MADV_DONTFORK)
(place / "file").write_bytes(os.urandom(6 * MIB))
with (place / "file").open("r+b") as file:
    private = mmap.mmap(file.fileno(), 6 * MIB, flags=mmap.MAP_PRIVATE)
    private[MIB : 2 * MIB] = os.urandom(MIB)
    kept["file"] = (private, mmap.PROT_READ)

child = os.fork()
if child == 0:
    del kept["not for a child"]
    shared[4 * MIB : 6 * MIB] = os.urandom(2 * MIB)
    shared.madvise(mmap.MADV_DONTNEED, 8 * MIB, MIB)
own(40 if child else 48)
start()
sums()
if child:
    while not (place / f"{child}.sum").exists():
        time.sleep(0.01)
    out.write_text("ready")
while True:
    signal.pause()
