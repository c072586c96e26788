"""What makes the driver's copy slow or fast: measured, not judged."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpucr_hpc.engine.cuda.driver import CtypesDriver
from tests.gpu.base import Place, case

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROGRAM = """
import sys, threading, torch
x = torch.randint(0, 1 << 62, (GIB << 27,), device="cuda", dtype=torch.int64)
busy = threading.Event()
def work():
    a = torch.randn(2048, 2048, device="cuda")
    while True:
        busy.wait()
        a = (a @ a).clamp(-1, 1); torch.cuda.synchronize()
threading.Thread(target=work, daemon=True).start()
s = x.sum().item()
print("ready", flush=True)
for line in sys.stdin:
    busy.set() if line.strip() == "busy" else busy.clear()
    print("ok", flush=True)
assert x.sum().item() == s
"""


def _vmstat() -> dict[str, int]:
    wanted = ("pgfault", "thp_fault_alloc", "thp_fault_fallback", "pgalloc_normal")
    pairs = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {name: int(value) for name, value in pairs if name in wanted}


def _cpu_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / 100, int(fields[12]) / 100


def _once(driver: CtypesDriver, pid: int) -> dict[str, Any]:
    driver.lock(pid, 5000)
    before, user, began = _vmstat(), _cpu_s(pid), time.monotonic()
    driver.checkpoint(pid)
    out, after, now = time.monotonic() - began, _vmstat(), _cpu_s(pid)
    began = time.monotonic()
    driver.restore(pid, {})
    back = time.monotonic() - began
    driver.unlock(pid)
    return {
        "out_s": round(out, 2),
        "back_s": round(back, 2),
        "user_s": round(now[0] - user[0], 2),
        "sys_s": round(now[1] - user[1], 2),
        **{k: after[k] - before[k] for k in before},
    }


@case("speed of the driver's copy", limit_s=150)
async def speed(_place: Place, _args: argparse.Namespace) -> dict[str, Any]:
    """An idle and a busy process, with small and with huge pages."""
    driver = CtypesDriver()
    driver.warm()
    program = _PROGRAM.replace("GIB", "2")
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    found: dict[str, Any] = {}
    kept = THP.read_text().split("[")[1].split("]")[0]
    try:
        child.stdout.readline()
        for pages in ("madvise", "always"):
            THP.write_text(pages)
            for state in ("idle", "busy", "busy"):
                child.stdin.write(state + "\n")
                child.stdin.flush()
                child.stdout.readline()
                await asyncio.sleep(0.5)
                found[f"{pages} {state} {len(found)}"] = _once(driver, child.pid)
    finally:
        THP.write_text(kept)
        child.kill()
        child.wait()
    return found
