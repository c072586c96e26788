"""gpucr doctor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpucr_hpc import slurm
from gpucr_hpc.agent import recipients
from gpucr_hpc.cli import doctor_host, doctor_nodes, doctor_slurm, doctor_store, output
from gpucr_hpc.cli.client import agent_pid, ask
from gpucr_hpc.cli.options import Json
from gpucr_hpc.config import Config, load
from gpucr_hpc.engine import criu
from gpucr_hpc.engine.cuda import doctor as gpu_doctor
from gpucr_hpc.errors import GpucrError, UsageError
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_keys, load_trusted

_Finding = dict[str, Any]

_UNPROTECTED = "jobs run without protection here"


def doctor(
    nodes: Annotated[str, typer.Option("--nodes", help="Check these nodes, such as n[1-64], over SSH.")] = "",
    user: Annotated[str, typer.Option("--user", help="Log in there as this account.")] = "",
    json: Json = False,
) -> None:
    """Check this node: configuration, CRIU, programs, keys, agent, store, and Slurm's live configuration.

    Exit code 0 when nothing stands against protected jobs, 10 otherwise.
    """
    if nodes:
        _of_nodes(nodes, user, json)
        return
    if user:
        raise UsageError(reason="--user needs --nodes")
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


def _of_nodes(text: str, user: str, json: bool) -> None:
    names = asyncio.run(slurm.hostnames(text))
    found = doctor_nodes.examine(names, user)
    rows = doctor_nodes.rows(found)
    good = all(finding["good"] for _, finding in rows)
    if json:
        output.as_json({"type": "doctor_nodes", "good": good, "nodes": found})
    else:
        lines = [
            (asyncio.run(slurm.host_list(nodes)), "ok" if f["good"] else "FAIL", f["what"], f["detail"], f["advice"])
            for nodes, f in rows
        ]
        output.table(("NODES", "STATE", "WHAT", "DETAIL", "ADVICE"), lines)
    if not good:
        raise typer.Exit(10)


def _finding(what: str, good: bool, detail: object, advice: str = "") -> _Finding:
    return {"what": what, "good": good, "detail": str(detail), "advice": "" if good else advice}


async def _examine(config: Config) -> list[_Finding]:
    findings = [_finding("root", os.geteuid() == 0, f"uid {os.geteuid()}", "run gpucr doctor as root")]
    try:
        info = await criu.inspect(config.engine)
        findings.append(_finding("CRIU", True, f"version {info.text}, kernel features present"))
    except GpucrError as error:
        findings.append(_finding("CRIU", False, error, f"{error.advice()}   # otherwise {_UNPROTECTED}"))
    for program in (criu.INIT_PROGRAM, criu.HOOK_PROGRAM, "/usr/lib/gpucr/gpucr-task"):
        found = os.access(program, os.X_OK)
        findings.append(
            _finding("program", found, program, f"make -C spank_plugin all install   # otherwise {_UNPROTECTED}")
        )
    findings += [_finding(*line) for line in await doctor_host.examine(config, agent_pid())]
    findings += [_finding(*line) for line in gpu_doctor.examine(config.cuda)]
    about_agent, bytes_per_s = _agent(config)
    findings += _keys(config) + about_agent + await _others()
    return findings + await _slurm(bytes_per_s)


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
            advice = f"{error.advice()}   # otherwise the agent does not start"
            findings.append(_finding("key", False, error, advice))
    found, problems = recipients.of_site(keys)
    findings += [_finding("recipient", True, f"{r.key_id} {r.method} {r.name}".strip()) for r in found]
    return findings + [
        _finding("recipient", False, problem, "new checkpoints are not sealed for him: renew or remove the file")
        for problem in problems
    ]


async def _others() -> list[_Finding]:
    """The agents of the cluster's other nodes: whether they answer, and have this node's key."""
    try:
        nodes = ask("status", nodes=await slurm.all_nodes())["nodes"]
    except GpucrError as error:
        return [_finding("agents", False, error, f"{error.advice()}   # otherwise {_UNPROTECTED}")]
    bad = [f"{node['node']}: {node['problem']}" for node in nodes if node["problem"]]
    detail = f"{len(nodes) - len(bad)} of {len(nodes)} nodes answer" + (": " + "; ".join(bad[:5]) if bad else "")
    advice = (
        "systemctl start gpucr-agent, there, with the same release, signing key and an open port   # otherwise jobs "
        "run without protection on these nodes, and jobs of several nodes wherever they have one of them"
    )
    return [_finding("agents", not bad, detail, advice)]


def _agent(config: Config) -> tuple[list[_Finding], float]:
    """Findings, and the store's speed in bytes per second, 0 when it is not known."""
    try:
        status = ask("status")
    except GpucrError as error:
        return [_finding("agent", False, error, f"{error.advice()}   # otherwise {_UNPROTECTED}")], 0.0
    state = f"on {status['node']}, release {status['version']}, {len(status['jobs'])} jobs"
    state += f": {status['problem']}" if status["problem"] else ""
    advice = "see CRIU's line, then start the agent anew   # until then jobs run without protection"
    findings = [_finding("agent", status["problem"] is None, state, advice)]
    try:
        probe = ask("probe_store")
    except GpucrError as error:
        return [*findings, _finding("store", False, *doctor_store.refused(config.store, error))], 0.0
    findings += [_finding(*line) for line in doctor_store.judge(config.store, probe)]
    return findings, float(probe["bytes_per_s"])


async def _slurm(bytes_per_s: float) -> list[_Finding]:
    try:
        live, partitions = await slurm.config(), await slurm.partitions()
    except GpucrError as error:
        return [_finding("Slurm", False, error, "is slurmctld up, and scontrol on this node?")]
    plugin = _finding(*doctor_host.plugin(live))
    found = doctor_slurm.judge(live)
    if bytes_per_s:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found += doctor_slurm.judge_partitions(partitions, bytes_per_s, memory)
    return [plugin, *(_finding(f.what, f.good, f.detail, f.advice) for f in found)]
