"""Bring the tree of an image back inside a new capsule."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucr_hpc.capsule.capsule import Builder, Capsule, RestorePids
from gpucr_hpc.capsule.processes import Process, highest_id
from gpucr_hpc.capsule.rundir import RunDir
from gpucr_hpc.config import EngineConfig
from gpucr_hpc.engine import criu, hooks
from gpucr_hpc.engine.dump import keep_log, put_private_files
from gpucr_hpc.engine.refill import Refill
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import RestoreFailed
from gpucr_hpc.proc import clean_env

_PID_DISTANCE = 64  # CRIU's own processes take pids above those that come back
_CRIU_RESERVED = 300  # its helpers have numbers above (criu/pstree.c, RESERVED_PIDS)


def describe_host(info: criu.CriuInfo) -> dict[str, Any]:
    """What of this host an image depends on, for its manifest."""
    return {
        "criu": info.text,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_flags": sorted(cpu_flags()),
    }


def cpu_flags() -> set[str]:
    """Instruction set flags of this host's first processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


# Of x86's words those that name instructions; the others say what the kernel, the firmware or a mitigation makes of it.
_INSTRUCTIONS = re.compile(
    "mmx|fxsr|sse|ssse|pni|avx|amx|fma|f16c|bmi|adx|aes|vaes|v?pclmul|sha|sm[34]|gfni|popcnt|abm|movbe|movdir|rdrand|"
    "rdseed|rdpid|rdtscp|rtm|hle|cx16|cx8|cmov|lahf|clflush|clwb|cldemote|fsgsbase|xsave|pku|ospke|waitpkg|serialize|"
    "3dnow|xop|tbm|lwp|enqcmd|cmpccxadd|rao|prefetch|wbnoinvd|invpcid"
)


def lacking(wanted: Iterable[str], there: Collection[str], machine: str) -> list[str]:
    """Instruction sets of `wanted` that are not there. Both as the kernel lists them (/proc/cpuinfo, `flags`)."""
    known = _INSTRUCTIONS.match if machine == "x86_64" else bool
    return sorted(flag for flag in wanted if known(flag) and flag not in there)


def check_host(meta: dict[str, Any], info: criu.CriuInfo) -> None:
    """Raise RestoreFailed when this host cannot take an image, before anything is made."""
    host = meta["host"]
    if host["machine"] != platform.machine():
        raise RestoreFailed(reason=f"made on {host['machine']}, this node is {platform.machine()}", log="none")
    if tuple(map(int, host["criu"].split("."))) > info.version:
        raise RestoreFailed(
            reason=f"made by CRIU {host['criu']}, this node has {info.text}: install the same or a newer one",
            log="none",
        )
    less = lacking(host["cpu_flags"], cpu_flags(), host["machine"])
    if less:
        raise RestoreFailed(reason=f"this node's processor lacks {', '.join(less[:8])}; use --constraint", log="none")


def tree_meta(capsule: Capsule, processes: list[Process]) -> dict[str, Any]:
    """The pids that a restore must know."""
    shepherd = next((p.nspid for p in processes if p.name == "gpucr-shepherd"), 0)
    return {
        "root": capsule.root,
        "shepherd": shepherd,
        "max_pid": max((highest_id(p) for p in processes), default=capsule.root),
        "processes": len(processes),
        "threads": sum(p.threads for p in processes),
    }


def pids(meta: dict[str, Any]) -> RestorePids:
    """Numbers for a restore. The new holder takes over that of the dumped one, which comes back with another
    (engine/renumber.py), unless CRIU might give it to a helper process: only sets of earlier versions have such."""
    root, highest = int(meta["tree"]["root"]), int(meta["tree"]["max_pid"])
    if root > _CRIU_RESERVED:
        return RestorePids(0, root, highest + _PID_DISTANCE)
    return RestorePids(root, highest + 1, highest + _PID_DISTANCE)


def in_image(meta: dict[str, Any]) -> list[int]:
    """The worker's `holder`: the number in the image, and the one that it comes back with."""
    return [int(meta["tree"]["root"]), pids(meta).old_holder]


@dataclass(frozen=True)
class Restored:
    """A tree that is back. fill_s: seconds of the restore in which its memory was filled, after CRIU."""

    capsule: Capsule
    fill_s: float


async def restore(
    builder: Builder,
    run_dir: RunDir,
    worker: WorkerClient,
    meta: dict[str, Any],
    config: EngineConfig,
    *,
    before_it_runs: Callable[[], Awaitable[None]] | None = None,
) -> Restored:
    """Files first, then the tree, which runs when this returns (its network still locked).

    before_it_runs: done when everything is restored and stands still; its failure makes the restore fail.
    Raises RestoreFailed with CRIU's reason and the place of its log, an ImageError or StoreError for a bad image.
    """
    await put_private_files(builder.capsule, worker)
    log = run_dir.work / "restore.log"
    argv, env = criu.restore_argv(config, run_dir.images, run_dir.work), clean_env()
    refill = Refill(builder.capsule, worker, await worker.call("to_fill"))
    late = [step for step in (refill if refill.pids else None, before_it_runs) if step is not None]

    async def before_resume() -> None:
        for step in late:
            await step()

    try:
        async with contextlib.AsyncExitStack() as stack:
            if late:
                hook = hooks.serve(run_dir.images, builder.capsule.uid, "post-restore", before_resume)
                env["GPUCR_HOOK_SOCKET"] = str(await stack.enter_async_context(hook))
                argv += ["--action-script", criu.HOOK_PROGRAM]
            capsule = await builder.restore(
                argv, env, old_root=pids(meta).old_holder, shepherd=meta["tree"]["shepherd"], log=log
            )
    except RestoreFailed as error:
        if refill.failure is not None:
            raise refill.failure from None
        await worker.call("cause")  # a damaged image is the cause then, not what CRIU makes of it
        reason = criu.explain_file(log) if log.exists() else str(error.fields["reason"])
        raise RestoreFailed(reason=reason, log=keep_log(log, run_dir.job)) from None
    return Restored(capsule, refill.took_s)
