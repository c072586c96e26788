"""Every error of the project, with its sentence, exit code and hint.

The docstring of a class is its message template, the class name is its id for machines. Exit codes by area:
1 unexpected, 2 usage, 10-19 host, 20-29 Slurm, 30-39 CUDA, 40-49 CRIU, 50-59 image, 60-69 store,
70-79 coordination, 80-89 keys and permissions.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class GpucrError(Exception):
    """unexpected error: {reason}"""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(self, **fields: object) -> None:
        super().__init__(fields)
        self.fields = fields

    def __str__(self) -> str:
        template = (type(self).__doc__ or type(self).__name__).strip()
        try:
            return template.format(**self.fields)
        except KeyError as missing:
            return f"{template} (no value for {missing})"

    def advice(self) -> str:
        """What the reader should do next; empty when the sentence says it all."""
        return self.hint.format_map(_Lenient(self.fields))

    def as_dict(self) -> dict[str, object]:
        """The error as a JSON record of type `exit_error`."""
        return {
            "type": "exit_error",
            "id": type(self).__name__,
            "code": self.exit_code,
            "message": str(self),
            "hint": self.advice(),
            "retryable": self.retryable,
        }


class _Lenient(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


class UsageError(GpucrError):
    """{reason}"""

    exit_code = 2


class ConfigError(GpucrError):
    """{path}: {reason}"""

    exit_code = 2
    hint = "correct the file; `gpucr config check` reads it again"


# --- host -----------------------------------------------------------------------------------------------


class HostError(GpucrError):
    """{reason}"""

    exit_code = 10


class ToolMissing(HostError):
    """cannot run {tool}: not found on this host"""

    exit_code = 11
    hint = "install the package that has {tool}"


class ToolFailed(HostError):
    """{argv0}: exit status {status} after {duration_s:.1f} s: {stderr}"""

    exit_code = 12


class AgentUnreachable(HostError):
    """cannot reach the gpucr agent at {path}: {reason}"""

    exit_code = 13
    hint = (
        "on a compute node: start it with `systemctl start gpucr-agent` and look at its journal; "
        "on a login node, which has none: `srun -N1 gpucr ...`"
    )


class CapsuleError(HostError):
    """job {job}: capsule on {node}: {reason}"""

    exit_code = 14


class LabError(HostError):
    """lab: {reason}"""

    exit_code = 15


# --- Slurm ----------------------------------------------------------------------------------------------


class SlurmError(GpucrError):
    """Slurm: {reason}"""

    exit_code = 20
    retryable = True


class JobUnknown(SlurmError):
    """job {job}: Slurm does not know this job"""

    exit_code = 21
    retryable = False


class JobNotProtected(SlurmError):
    """job {job}: no protected part of it runs on {node}"""

    exit_code = 22
    retryable = False
    hint = "only protected jobs that run can be checkpointed; `gpucr status --all` shows them"


class RequeueFailed(SlurmError):
    """job {job}: could not be requeued: {reason}"""

    exit_code = 23


# --- CUDA -----------------------------------------------------------------------------------------------


class CudaError(GpucrError):
    """GPU: {reason}"""

    exit_code = 30


class CudaDriverUnusable(CudaError):
    """the NVIDIA driver of this host cannot be used for checkpoints: {reason}"""

    exit_code = 31
    hint = "driver 570 or newer is needed, 580 or newer to come back on other GPUs"


class CudaNotReady(CudaError):
    """pid {pid}: work on the GPU did not come to rest within {timeout_ms} ms"""

    exit_code = 32
    retryable = True
    hint = "a long kernel, or a collective that waits for another rank; it is tried again"


class CudaNotSupported(CudaError):
    """pid {pid}: {call} is refused by the driver for this process: {reason}"""

    exit_code = 33
    hint = "peer memory (NCCL over NVLink), managed memory, MIG and MPS cannot be saved: docs/gpu.md"


class CudaCallFailed(CudaError):
    """pid {pid}: {call} failed: {reason}"""

    exit_code = 34


class CudaMemoryTaken(CudaError):
    """pid {pid}: the GPU has no room for the job's memory: {reason}"""

    exit_code = 35
    retryable = True
    hint = "another program holds memory of that GPU; `nvidia-smi` names it. The checkpoint is kept"


class CudaMapImpossible(CudaError):
    """this node's GPUs cannot take the job: {reason}"""

    exit_code = 36
    hint = "a job comes back on GPUs of the same type and at least as many; use --constraint or --gres with the type"


class CudaHung(CudaError):
    """pid {pid}: {call} was not answered within {limit_s} s"""

    exit_code = 37


class CudaHostMemory(CudaError):
    """the GPU memory of this job does not fit in memory: {needed} needed, {free} free {where}"""

    exit_code = 38
    retryable = True
    hint = "a checkpoint holds the GPUs' content in host memory: ask for more with --mem"


class CudaProcessFailed(CudaError):
    """pid {pid}: the driver has given this process up after {call}"""

    exit_code = 39


# --- CRIU -----------------------------------------------------------------------------------------------


class CriuError(GpucrError):
    """{reason} (log: {log})"""

    exit_code = 40


class CriuUnusable(CriuError):
    """CRIU cannot be used on this host: {reason}"""

    exit_code = 41
    hint = "install criu >= 4.2.1 and run `gpucr doctor`"


class DumpFailed(CriuError):
    """checkpoint failed, the job runs on: {reason} (log: {log})"""

    exit_code = 42


class RestoreFailed(CriuError):
    """restore failed: {reason} (log: {log})"""

    exit_code = 43


class Refused(CriuError):
    """cannot be checkpointed: {reason}"""

    exit_code = 44
    hint = "the job was not touched and runs on"


class CheckpointUnfit(CriuError):
    """it does not fit this job: {reason}"""

    exit_code = 45


# --- image ----------------------------------------------------------------------------------------------


class ImageError(GpucrError):
    """{path}: {reason}"""

    exit_code = 50


class FormatUnknown(ImageError):
    """{path}: format version {found} is not known (this release reads {known})"""

    exit_code = 51
    hint = "restore with the release that wrote it, or a newer one"


class IntegrityError(ImageError):
    """{path}: damaged or altered: {reason}"""

    exit_code = 52
    hint = "an older checkpoint may still be good: `gpucr list JOB`"


class MemoryUnreadable(ImageError):
    """the job's memory cannot be read: {reason}"""

    exit_code = 54


class SignatureError(ImageError):
    """{path}: the signature is not one of this cluster's: {reason}"""

    exit_code = 53


# --- store ----------------------------------------------------------------------------------------------


class StoreError(GpucrError):
    """{path}: {reason}"""

    exit_code = 60


class StoreFull(StoreError):
    """{path}: no space left: {reason}"""

    exit_code = 61
    hint = "free space or raise the quota; the set before this one is still there"


class CheckpointMissing(StoreError):
    """no checkpoint {checkpoint} in {path}"""

    exit_code = 62


class ObjectMissing(StoreError):
    """{path}: no such file"""

    exit_code = 63
    hint = "the checkpoint is not complete; an older one may still be good: `gpucr list JOB`"


def store_error(path: object, error: OSError) -> StoreError:
    """The store's error for an OSError: StoreFull when space or quota ran out, StoreError otherwise."""
    reason = error.strerror or error
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(path=path, reason=reason)
    return StoreError(path=path, reason=reason)


# --- coordination ---------------------------------------------------------------------------------------


class CoordinationError(GpucrError):
    """job {job}: {reason}"""

    exit_code = 70
    retryable = True


class DeadlineExceeded(CoordinationError):
    """job {job}: {phase} was not done within {limit_s:.1f} s"""

    exit_code = 71


class Busy(CoordinationError):
    """job {job}: {operation} is under way"""

    exit_code = 72
    hint = "give the command again when it is over"


class CheckpointGivenUp(Busy):
    """job {job}: its checkpoint was given up, since the job ends or leaves"""


class CutNotPossible(CoordinationError):
    """job {job}: cannot be checkpointed at this moment: {reason}"""

    exit_code = 74
    retryable = True


class RunOver(CoordinationError):
    """job {job}: its run {run} is over for Slurm"""

    exit_code = 76


class NcclCutNotReached(CoordinationError):
    """job {job}: its NCCL operations did not come to a common point within {limit_s:g} s: {reason}"""

    exit_code = 77
    retryable = True
    hint = "a rank that waits elsewhere, or an operation that cannot end; all ranks were let go on"


class NcclUnprotected(CoordinationError):
    """job {job}: its NCCL communicators cannot be made again: {reason}"""

    exit_code = 78
    hint = "docs/nccl-cut.md says what is supported"


class NcclFailed(CoordinationError):
    """pid {pid}: NCCL: {reason}"""

    exit_code = 79


class PeerLost(CoordinationError):
    """job {job}: the agent on {node} is lost: {reason}"""

    exit_code = 73
    hint = "is gpucr-agent running there, and is its port reachable from this node?"


class PeerVersion(PeerLost):
    """the agent on {node} speaks version {theirs} of the agents' protocol, this node's version {ours}"""

    hint = "install the same gpucr-hpc on both nodes and start their agents anew"


class DrainIncomplete(CoordinationError):
    """{nodes}: not empty: {reason}"""

    exit_code = 75
    hint = "they stay drained; give the command again to go on, or `gpucr undrain`"


# --- keys and permissions -------------------------------------------------------------------------------


class PermissionRefused(GpucrError):
    """{who} may not {action}"""

    exit_code = 80


class KeyFileError(GpucrError):
    """{path}: {reason}"""

    exit_code = 81
    hint = "keys must be regular files, owned by root, mode 0600: `gpucr key generate` makes them"


class RecipientError(KeyFileError):
    """{path}: {reason}"""

    exit_code = 83
    hint = "recipients are certificates and public keys in PEM, in a file that nobody but its owner may write"


class WrongKey(GpucrError):
    """checkpoint {checkpoint} is sealed for key {wanted}, not for {have}"""

    exit_code = 82
    hint = "restore on a node that has site key {wanted}, or install it; or use the private key of a recipient"
