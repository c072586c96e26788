"""What stands against the checkpoint of a GPU job, found before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpucr_hpc.capsule.processes import Process
from gpucr_hpc.engine.cuda import processes as procfs
from gpucr_hpc.engine.cuda.inventory import MINIMUM_DRIVER
from gpucr_hpc.engine.cuda.node import GpuProcess, NodeGpus
from gpucr_hpc.engine.nccl.node import Covered
from gpucr_hpc.engine.nccl.report import ON_ONE_CARD, shared_cards
from gpucr_hpc.engine.preflight import Finding
from gpucr_hpc.errors import CudaHostMemory
from gpucr_hpc.units import format_bytes

# Beside the copy, the driver and CRIU need some memory of their own.
_RESERVE_BYTES = 512 << 20
_OFF = ("", "0")
_NVSHMEM = "nvshmem_bootstrap_"  # a part that it loads when it begins; the library itself comes with PyTorch


def check(gpus: NodeGpus, processes: list[Process], covered: Mapping[int, Covered]) -> list[Finding]:
    """Findings about the GPU processes and about those that hold a GPU without being one.

    covered: see engine.nccl.node.
    """
    if gpus.inventory is None:
        return list(_holders(gpus, processes))
    inventory, findings = gpus.inventory, list(_holders(gpus, processes))
    first = gpus.processes[0] if gpus.processes else None
    if first is not None:
        if inventory.branch < MINIMUM_DRIVER:
            what = f"NVIDIA driver {inventory.driver} cannot checkpoint, {MINIMUM_DRIVER} or newer can"
            findings.append(_finding(first, what))
        if any(gpu.mig for gpu in gpus.seen()):
            findings.append(_finding(first, "runs on a GPU in MIG mode, which the driver cannot checkpoint"))
        if inventory.mps:
            findings.append(_finding(first, "shares its GPU through MPS, which the driver cannot checkpoint"))
    shared = shared_cards(one.cards for one in covered.values())
    for process in gpus.processes:
        if process.pid in covered and covered[process.pid].shares:
            findings.append(_finding(process, f"cannot be brought back: {covered[process.pid].shares}"))
        if process.pid in covered and covered[process.pid].cards & shared:
            findings.append(_finding(process, f"cannot be brought back (--checkpoint-nccl=rebuild): {ON_ONE_CARD}"))
        if procfs.maps_library(process.pid, _NVSHMEM):
            what = "uses NVSHMEM, which shares memory of GPUs between processes: the driver cannot bring that back"
            findings.append(_finding(process, what))
    findings += [_finding(rank.process, rank.problem) for rank in _peers(gpus, covered) if rank.problem]
    return findings


def must_be_rebuilt(gpus: NodeGpus, covered: Mapping[int, Covered]) -> bool:
    """Whether `check` finds nothing against ranks of NCCL only because their communicators will be taken away."""
    return any(rank.let_through for rank in _peers(gpus, covered))


@dataclass(frozen=True)
class _Peer:
    """A rank of NCCL that is not alone on this node. problem: why it cannot be saved, empty when it can; let_through:
    it may share memory, until its communicators are taken away."""

    process: GpuProcess
    problem: str
    let_through: bool


def _peers(gpus: NodeGpus, covered: Mapping[int, Covered]) -> list[_Peer]:
    """NCCL between processes of one node: with peer-to-peer or shared memory the driver's checkpoint succeeds, its
    restore fails, and the job is lost. So it must be ruled out before, unless the interposer takes it away."""
    ranks: list[_Peer] = []
    for process in gpus.processes if len(gpus.processes) > 1 else []:
        if not procfs.listens(process.pid):
            continue
        why = covered[process.pid].why if process.pid in covered else None
        if not procfs.maps_library(process.pid, "libnccl.so"):
            inside = procfs.nccl_linked_in(process.pid)
            if not inside:
                continue
            why = f"NCCL is linked into {inside}, where nothing can stand before it"
        env = procfs.environment(process.pid)
        on = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if env.get(name, "") in _OFF]
        ranks.append(_Peer(process, _peer_problem(on, why), bool(on) and why == ""))
    return ranks if len(ranks) > 1 else []


def _peer_problem(on: list[str], why: str | None) -> str:
    if not on or why == "":
        return ""
    if why:
        return f"is a rank of NCCL, and its communicators cannot be made again (--checkpoint-nccl=rebuild): {why}"
    return (
        "is a rank of NCCL and may share GPU memory with others of this node, at the full speed of NVLink or "
        "shared memory, which the driver cannot bring back: sbatch --checkpoint-nccl=safe "
        f"({' '.join(f'{name}=1' for name in on)}) would protect it, with a much slower all-reduce, and "
        "--checkpoint-nccl=rebuild at full speed"
    )


def _finding(process: GpuProcess, what: str) -> Finding:
    return Finding(process.nspid, process.name, what)


def _holders(gpus: NodeGpus, processes: list[Process]) -> Iterator[Finding]:
    """Processes with a device of the driver that have not initialized CUDA themselves."""
    own = {p.pid for p in gpus.processes}
    by_pid = {p.pid: p for p in processes}
    for process in processes:
        if process.pid in own or process.state in "ZX":
            continue
        held = next((path for _, path in procfs.devices(process.pid)), None)
        if held is None:
            continue
        parent = by_pid.get(process.ppid)
        if parent is not None and parent.pid in own:
            what = (
                f"was forked by {parent.name} (pid {parent.nspid}) after that had begun to use the GPU and holds "
                f'{held}: start such children before, or with multiprocessing\'s "forkserver" or "spawn"'
            )
        else:
            what = f"holds {held} without CUDA (a monitor, OpenGL or Vulkan), which cannot be saved"
        yield Finding(process.nspid, process.name, what)


def check_memory(gpus: NodeGpus) -> None:
    """Raise CudaHostMemory when the GPUs' content does not fit beside what the job uses."""
    if not gpus.processes:
        return
    needed = sum(p.bytes for p in gpus.processes) + _RESERVE_BYTES
    for process in gpus.processes:
        free, where = procfs.free_memory(process.pid)
        if free < needed:
            raise CudaHostMemory(needed=format_bytes(needed), free=format_bytes(free), where=where)
