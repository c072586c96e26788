"""What a GPU machine has, and how the driver's calls behave on it; printed as lines for a person."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from gpucr_hpc.engine.cuda import inventory, processes
from gpucr_hpc.engine.cuda.driver import BindingsDriver, CallFailed, CtypesDriver
from tests.gpu import programs

PLAIN = """
import torch, time, sys
x = torch.randint(0, 255, (int(float(sys.argv[1]) * (1 << 30)),), dtype=torch.uint8, device="cuda")
s = x.sum().item()
print("ready", flush=True)
sys.stdin.readline()
print("same" if x.sum().item() == s else "CHANGED", flush=True)
"""


def sh(command: str, limit_s: float = 30) -> str:
    start = time.monotonic()
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=limit_s, check=False)
        text = (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        text = "TIMEOUT"
    print(f"--- {command}  [{time.monotonic() - start:.2f} s]\n{text[:1500]}", flush=True)
    return text


def machine(criu: str) -> None:
    sh("id; uname -r; nproc; free -g | head -2; grep Cap /proc/self/status; stat -f -c %T /run /tmp /dev/shm /")
    sh("nvidia-smi -L; nvidia-smi --query-gpu=driver_version,persistence_mode,mig.mode.current --format=csv")
    sh("ls -la /dev/nvidia* /dev/nvidia-caps 2>&1 | head -20; cat /proc/driver/nvidia/gpus/*/information")
    sh("mount | grep -E 'cgroup|/run|nvidia|overlay' | head; cat /proc/self/cgroup")
    sh(f"cat /sys/kernel/mm/transparent_hugepage/enabled; realpath {sys.executable}; which tar nft nsenter ip bash")
    as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups"
    sh(f"{as_nobody} {sys.executable} -c 'import torch; print(torch.__version__)'", 90)
    sh(f"{criu} --version; {criu} check; echo status $?")
    sh("nft list tables; echo status $?; ls /proc/sys/kernel/ns_last_pid; df -h / /tmp /dev/shm /run | cat")
    sh("numactl -H 2>/dev/null | head -5; lscpu | grep -E 'Model name|NUMA|^CPU\\(s\\)'")


def started(program: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", program, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout is not None
    print("started:", child.stdout.readline().strip(), flush=True)
    return child


def shown(pid: int) -> None:
    print("  cards", processes.cards(pid), dict(Counter(path for _, path in processes.devices(pid))))
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/nvidia" in line]
    print("  maps", len(lines), *lines[:6], sep="\n    ")
    threads = Counter(Path(f"/proc/{pid}/task/{t}/comm").read_text().strip() for t in os.listdir(f"/proc/{pid}/task"))
    print("  threads", dict(threads), flush=True)


def timed(what: str, call) -> None:
    start = time.monotonic()
    try:
        result = call()
    except CallFailed as error:
        result = error
    print(f"  {what}: {result}  [{time.monotonic() - start:.3f} s]", flush=True)


def driver(gib: float) -> None:
    start = time.monotonic()
    ctyped = CtypesDriver()
    print(f"ctypes loaded [{time.monotonic() - start:.3f} s]")
    start = time.monotonic()
    bindings = BindingsDriver()
    nowhere = "GPU-11111111-1111-1111-1111-111111111111"
    print(f"bindings loaded [{time.monotonic() - start:.3f} s]")
    timed("inventory", inventory.read)
    child = started(PLAIN, str(gib))
    shown(child.pid)
    timed("own process before cuInit", lambda: ctyped.restore_thread(os.getpid()))
    timed("a shell", lambda: ctyped.restore_thread(os.getppid()))
    uuids = [gpu.uuid for gpu in inventory.read().gpus]
    for name, d in (("ctypes", ctyped), ("bindings", bindings)):
        print(name)
        for what, call in (
            ("restore thread", lambda d=d: d.restore_thread(child.pid)),
            ("state", lambda d=d: d.state(child.pid)),
            ("unlock while running", lambda d=d: d.unlock(child.pid)),
            ("lock", lambda d=d: d.lock(child.pid, 500)),
            ("lock again", lambda d=d: d.lock(child.pid, 500)),
            ("state", lambda d=d: d.state(child.pid)),
            ("checkpoint", lambda d=d: d.checkpoint(child.pid)),
            ("state", lambda d=d: d.state(child.pid)),
            ("devices left", lambda: list(processes.devices(child.pid))),
            ("restore without cuInit", lambda d=d: d.restore(child.pid, {})),
            ("cuInit", lambda d=d: d.warm()),
            ("state", lambda d=d: d.state(child.pid)),
            ("unlock", lambda d=d: d.unlock(child.pid)),
            ("lock", lambda d=d: d.lock(child.pid, 500)),
            ("checkpoint", lambda d=d: d.checkpoint(child.pid)),
            ("restore, wrong map", lambda d=d: d.restore(child.pid, {uuids[0]: nowhere})),
            ("restore, identity map", lambda d=d: d.restore(child.pid, {u: u for u in uuids})),
            ("unlock", lambda d=d: d.unlock(child.pid)),
            ("state", lambda d=d: d.state(child.pid)),
        ):
            timed(what, call)
    print(child.communicate("\n", timeout=60)[0].strip())
    print("managed memory")
    folder = Path("/var/tmp/managed")
    folder.mkdir(exist_ok=True)
    managed = subprocess.Popen([sys.executable, "-c", programs.MANAGED], cwd=folder)
    while not (folder / "train.log").exists() and managed.poll() is None:
        time.sleep(0.1)
    time.sleep(1)
    shown(managed.pid)
    for what, call in (
        ("lock", lambda: ctyped.lock(managed.pid, 2000)),
        ("checkpoint", lambda: ctyped.checkpoint(managed.pid)),
        ("state", lambda: ctyped.state(managed.pid)),
        ("devices left", lambda: list(processes.devices(managed.pid))),
        ("restore", lambda: ctyped.restore(managed.pid, {})),
        ("unlock", lambda: ctyped.unlock(managed.pid)),
        ("state", lambda: ctyped.state(managed.pid)),
    ):
        timed(what, call)
    time.sleep(1)
    print("managed log", (folder / "train.log").read_text().splitlines()[-2:], managed.poll())
    managed.kill()


def main(criu: str, gib: float) -> None:
    if gib > 1:
        machine(criu)
    if shutil.which("nvidia-smi"):
        ctypes.CDLL(None)
        driver(gib)
