"""What stands against GPU jobs on this node, for `gpucr doctor`: no job is looked at, no card is touched."""

from __future__ import annotations

import ctypes
from pathlib import Path

from gpucr_hpc.config import CudaConfig
from gpucr_hpc.engine.cuda import inventory
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.inventory import MINIMUM_DRIVER, REMAP_DRIVER, Inventory
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.units import format_bytes

#: What is looked at, whether it is good, what was found, what to do otherwise.
Line = tuple[str, bool, str, str]

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine(config: CudaConfig) -> list[Line]:
    """Lines for this node; one that says so on a node without NVIDIA's driver."""
    if config.driver == "off":
        return [("GPUs", True, 'cuda.driver is "off": GPU jobs are not protected', "")]
    if not procfs.driver_loaded():
        return [("GPUs", True, "no NVIDIA driver on this node", "")]
    try:
        found = inventory.read()
    except GpucrError as error:
        return [("GPUs", False, str(error), error.advice())]
    try:
        huge_pages = HUGE_PAGES.read_text()
    except OSError:
        huge_pages = ""
    return [*judge(found, huge_pages), *_library()]


def judge(found: Inventory, huge_pages: str) -> list[Line]:
    """huge_pages: what the kernel's switch for transparent huge pages says."""
    cards = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in found.gpus) or "none"
    lines = [("GPUs", bool(found.gpus), cards, "the driver is loaded, and nvidia-smi shows no card")]
    detail = f"driver {found.driver}"
    if MINIMUM_DRIVER <= found.branch < REMAP_DRIVER:
        detail += f": jobs come back on the same cards only, on others with {REMAP_DRIVER} or newer"
    advice = f"install driver {MINIMUM_DRIVER} or newer, the same on all nodes: older ones cannot checkpoint"
    lines.append(("GPU driver", found.branch >= MINIMUM_DRIVER, detail, advice))
    if any(gpu.mig for gpu in found.gpus):
        advice = "the driver cannot checkpoint MIG instances: keep GPU jobs that ask for protection off this node"
        lines.append(("MIG", False, "on", advice))
    if found.mps:
        lines.append(("MPS", False, "runs", "the driver cannot checkpoint processes that share a GPU through MPS"))
    if huge_pages and "[always]" not in huge_pages:
        mode = huge_pages.partition("[")[2].partition("]")[0]
        lines.append(("huge pages", True, f"{mode}; `always` makes copies of GPU memory faster (docs/gpu.md)", ""))
    return lines


def _library() -> list[Line]:
    """The driver's library for programs, as a worker would find it."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return [("libcuda", False, str(error), "the agent's workers need it: ldconfig, or LD_LIBRARY_PATH in its unit")]
    missing = not hasattr(library, "cuCheckpointProcessLock")
    return [("libcuda", not missing, "libcuda.so.1", f"it has no checkpoint calls: driver {MINIMUM_DRIVER} or newer")]
