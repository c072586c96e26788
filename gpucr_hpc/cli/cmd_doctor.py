"""gpucr doctor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gpucr_hpc import slurm
from gpucr_hpc.agent import recipients
from gpucr_hpc.cli import output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.config import Config, load
from gpucr_hpc.engine import criu
from gpucr_hpc.engine.cuda import doctor as gpu_doctor
from gpucr_hpc.errors import GpucrError
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_keys, load_trusted
from gpucr_hpc.units import format_bytes

_Finding = dict[str, Any]

# slurm.conf: key (lower case), test of its value, what a wrong value costs, line to add. Reasons: docs/admin.md.
_SLURM_RULES: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
    (
        "proctracktype",
        lambda v: v == "proctrack/cgroup",
        "Slurm would signal every process of a job itself, and could not end a capsule",
        "ProctrackType=proctrack/cgroup",
    ),
    (
        "preemptmode",
        lambda v: "REQUEUE" in v.upper(),
        "preempted jobs are cancelled or suspended, not moved",
        "PreemptMode=REQUEUE",
    ),
    (
        "preemptparameters",
        lambda v: "send_user_signal" in v,
        "a preempted job learns of it only when its processes are killed",
        "PreemptParameters=send_user_signal",
    ),
    ("jobrequeue", lambda v: v == "1", "jobs are not requeued unless they ask for it", "JobRequeue=1"),
    (
        "maxbatchrequeue",
        lambda v: v.isdigit() and int(v) >= 100,
        "a job that is moved often is held after this many requeues",
        "MaxBatchRequeue=1000",
    ),
    (
        "schedulerparameters",
        lambda v: "requeue_delay" in v,
        "a requeued job waits up to two minutes before it may start (Slurm 25.11 and newer)",
        "SchedulerParameters=requeue_delay=1",
    ),
)


def doctor(json: Annotated[bool, typer.Option("--json", help=output.JSON_HELP)] = False) -> None:
    """Check this node: configuration, CRIU, programs, keys, agent, store, and Slurm's live configuration.

    Exit code 0 when nothing stands against protected jobs, 10 otherwise.
    """
    findings = asyncio.run(_examine(load()))
    bad = [f for f in findings if not f["good"]]
    if json:
        output.as_json({"type": "doctor", "good": not bad, "findings": findings})
    else:
        for finding in findings:
            print(f"{'ok  ' if finding['good'] else 'FAIL'}  {finding['what']}: {finding['detail']}")
            if finding["advice"]:
                print(f"      -> {finding['advice']}")
    if bad:
        raise typer.Exit(10)


def _finding(what: str, good: bool, detail: object, advice: str = "") -> _Finding:
    return {"what": what, "good": good, "detail": str(detail), "advice": "" if good else advice}


async def _examine(config: Config) -> list[_Finding]:
    findings = [_finding("root", os.geteuid() == 0, f"uid {os.geteuid()}", "run gpucr doctor as root")]
    try:
        info = await criu.inspect(config.engine)
        findings.append(_finding("CRIU", True, f"version {info.text}, kernel features present"))
    except GpucrError as error:
        findings.append(_finding("CRIU", False, error, error.advice()))
    for program in (criu.INIT_PROGRAM, criu.HOOK_PROGRAM, "/usr/lib/gpucr/gpucr-task"):
        found = os.access(program, os.X_OK)
        findings.append(
            _finding("program", found, program, "build and install it: make -C spank_plugin all install")
        )
    findings += [_finding(*line) for line in gpu_doctor.examine(config.cuda)]
    findings += _keys(config) + _agent(config)
    return findings + await _slurm()


def _keys(config: Config) -> list[_Finding]:
    keys = config.keys
    loaders: tuple[tuple[str, Callable[[], object]], ...] = (
        (keys.site, lambda: load_site_keys(keys.site, keys.others)),
        (keys.signing, lambda: load_trusted(keys.trusted, load_signing_key(keys.signing))),
    )
    findings = []
    for path, loader in loaders:
        try:
            loader()
            findings.append(_finding("key", True, path))
        except GpucrError as error:
            findings.append(_finding("key", False, error, error.advice()))
    found, problems = recipients.of_site(keys)
    findings += [_finding("recipient", True, f"{r.key_id} {r.method} {r.name}".strip()) for r in found]
    return findings + [
        _finding("recipient", False, problem, "new checkpoints are not sealed for him: renew or remove the file")
        for problem in problems
    ]


def _agent(config: Config) -> list[_Finding]:
    try:
        status = ask("status")
        findings = [_finding("agent", status["problem"] is None, f"on {status['node']}, {len(status['jobs'])} jobs")]
        probe = ask("probe_store")
    except GpucrError as error:
        return [_finding("agent", False, error, error.advice())]
    detail = f"{probe['root']}: {format_bytes(probe['free_bytes'])} free, {probe['seconds']:.3f} s for a synced write"
    findings.append(_finding("store", probe["free_bytes"] > 1 << 30, detail, "less than 1 GiB is free"))
    if Path(config.store.root).parts[:2] == ("/", "var"):
        advice = "set store.root to a directory of the parallel file system that every node mounts"
        findings.append(_finding("store", False, f"{config.store.root} looks local to this node", advice))
    return findings


async def _slurm() -> list[_Finding]:
    try:
        live = await slurm.config()
    except GpucrError as error:
        return [_finding("Slurm", False, error, "is slurmctld up, and scontrol on this node?")]
    findings = []
    for key, test, cost, line in _SLURM_RULES:
        value = live.get(key, "(not set)")
        good = bool(test(value))
        findings.append(_finding("Slurm", good, f"{key}={value}", f"{line}   # otherwise {cost}"))
    return findings
