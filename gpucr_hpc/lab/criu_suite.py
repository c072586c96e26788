"""`scripts/criu_suite`: CRIU's own test programs (zdtm, static) as protected jobs, each moved once to another node.

Each sets a state, waits, is moved, and checks its state. Taken are those that run without root and outside of
namespaces of their own, and do not test an option that gpucr does not give to CRIU. The sources are those of Debian's
package criu. One that does not pass is run once more as a job without protection, so that what cannot pass on this
machine is told from what gpucr broke.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import GpucrError, LabError
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import HOMES
from gpucr_hpc.lab.nodes import USERS
from gpucr_hpc.lab.rootfs import debian_mirror
from gpucr_hpc.lab.wait import wait_until

_USER, _GROUP = "alice", 100
_NODES = 4
_LIMIT_S = 120.0
_BUILD_LIMIT_S = 1800
_ARCHIVE = "criu_*.orig.tar.*"
_MEMORY = "600M"
#: Of CRIU, and not of gpucr: connections closed or forgotten, sockets to processes outside.
_OTHER_OPTIONS = {"--tcp-close", "--skip-in-flight", "--ext-unix-sk"}
#: What zdtm's Makefile gives to programs besides a file or a directory.
_ARGUMENTS = {
    "cmdlinenv00": "--arg1=arg1 --arg2=arg2 --arg3=arg3",
    "env00": "--envname=ENV_00_TEST",
    "fifo-rowo-pair": "--name_master=m.test --name_slave=s.test",
    "shm-hugetlb": "--shmem_size=4194304",
    "shm-unaligned": "--shmem_size=5000",
    "umask00": "--mask=0345",
}
_PLACES = {
    "TST_FILE": "--filename=x.test",
    "TST_DIR": "--dirname=d.test",
    "TST_DIR_FILE": "--dirname=d.test --filename=x.test",
    "TST_NOFILE": "",
}
_SCRIPT = """#!/bin/bash
export ZDTM_DELTA=600
timeout 100 ./{name} --pidfile=pid --outfile=result {arguments} || exit 91
echo ready
until [ -e go ]; do sleep 0.1; done
pid=$(cat pid)
kill -TERM $pid || exit 92
for i in $(seq 600); do kill -0 $pid 2>/dev/null || break; sleep 0.1; done
cat result*
grep -q PASS result
"""


@dataclass(frozen=True)
class Program:
    """arguments: besides the files that each has."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Verdict:
    """what: passed, refused (said before anything was stopped; it went on and passed), failed, or not here (without
    protection, too). why: its last words."""

    name: str
    what: str
    why: str = ""


def fetch(cache: Path) -> Path:
    """The archive of the sources of Debian's criu, from the cache if it is there. Raises LabError, ToolFailed."""
    kept = cache / "criu-sources"
    if not list(kept.glob(_ARCHIVE)):
        mirror = debian_mirror()
        if mirror is None:
            raise LabError(reason="apt-get knows no archive of Debian here")
        (kept / "lists/partial").mkdir(parents=True, exist_ok=True)
        (kept / "sources").write_text(f"deb-src {mirror} sid main\n")
        own = [f"Dir::Etc::sourcelist={kept}/sources", "Dir::Etc::sourceparts=-", f"Dir::State::lists={kept}/lists"]
        apt = ["apt-get", "-q", *(word for option in own for word in ("-o", option))]
        proc.run([*apt, "-o", "APT::Update::Error-Mode=any", "update"], timeout_s=_BUILD_LIMIT_S).check()
        proc.run([*apt, "--tar-only", "source", "criu"], cwd=str(kept), timeout_s=_BUILD_LIMIT_S).check()
    archives = list(kept.glob(_ARCHIVE))
    if len(archives) != 1:
        raise LabError(reason=f"{kept} has the archives {[path.name for path in archives]}: remove it")
    return archives[0]


def unpack(archive: Path, work: Path) -> Path:
    """The folder of the test programs."""
    proc.run(["tar", "-xf", str(archive), "-C", str(work)], timeout_s=_BUILD_LIMIT_S).check()
    (tree,) = work.iterdir()
    return tree / "test/zdtm"


def build(zdtm: Path) -> None:
    """What can be built with a compiler alone; a program that needs a library is missing then."""
    for folder in ("lib", "static"):
        proc.run(["make", "-k", f"-j{os.cpu_count()}", "-C", str(zdtm / folder)], timeout_s=_BUILD_LIMIT_S)
    if not (zdtm / "lib/libzdtmtst.a").exists():
        raise LabError(reason=f"make -C {zdtm}/lib failed")


def programs(static: Path) -> list[Program]:
    """Those that are to be run, by name."""
    makefile = (static / "Makefile").read_text().replace("\\\n", " ")
    found = []
    for variable, places in _PLACES.items():
        for words in re.findall(rf"^{variable}\s*[+:]?=(.*)$", makefile, re.MULTILINE):
            for name in re.findall(r"(?<!\S)[\w.-]+(?!\S)", words):
                path = static / f"{name}.desc"
                text = path.read_text().strip() if path.exists() else ""
                if os.access(static / name, os.X_OK) and _is_wanted(text):
                    found.append(Program(name, _ARGUMENTS.get(name, places)))
    return sorted(set(found), key=lambda program: program.name)


def _is_wanted(description: str) -> bool:
    """description: a Python dictionary of strings, as zdtm.py reads it."""
    fields = dict(re.findall(r"""['"](\w+)['"]\s*:\s*['"]([^'"]*)['"]""", description))
    flags, flavors = fields.get("flags", "").split(), fields.get("flavor", "h").split()
    options = set(fields.get("opts", "").split())
    on_this = "x86_64" in fields.get("arch", "x86_64").split()
    return "h" in flavors and on_this and not {"suid", "noauto"} & set(flags) and not options & _OTHER_OPTIONS


class Suite:
    """Runs programs in a lab that is up."""

    def __init__(self, lab: Lab, static: Path) -> None:
        self._lab, self._static = lab, static
        self._home = lab.state / HOMES.lstrip("/") / _USER / "criu-suite"
        shutil.rmtree(self._home, ignore_errors=True)
        self._directory(self._home)

    def _directory(self, path: Path) -> None:
        path.mkdir()
        os.chown(path, USERS[_USER], _GROUP)

    def run(self, program: Program) -> Verdict:
        """One program, moved; and once more without protection, if that did not go well."""
        try:
            refusal = self._one(program, move=True)
            return Verdict(program.name, "refused" if refusal else "passed", refusal)
        except GpucrError as error:
            why = str(error)
        try:
            self._one(program, move=False)
        except GpucrError as error:
            return Verdict(program.name, "not here", str(error))
        return Verdict(program.name, "failed", why)

    def _one(self, program: Program, *, move: bool) -> str:
        """Why it was not moved, if it was refused. Raises LabError when it does not pass."""
        directory = self._home / (program.name if move else f"{program.name}.unmoved")
        self._directory(directory)
        os.chown(shutil.copy2(self._static / program.name, directory), USERS[_USER], _GROUP)
        inside = f"{HOMES}/{_USER}/criu-suite/{directory.name}"
        options = ["--checkpoint-on-preempt"] if move else []
        options += [f"--chdir={inside}", f"--output={inside}/output", f"--mem={_MEMORY}", f"--job-name={program.name}"]
        job = self._lab.sbatch(_SCRIPT.format(name=program.name, arguments=program.arguments), _USER, *options)
        try:
            self._said(job, directory, "ready\n")
            refusal = self._move(job, directory) if move else ""
            (directory / "go").touch()
            wait_until(lambda: self._lab.is_over(job), _LIMIT_S, f"the end of {program.name}")
            if "COMPLETED" not in self._lab.job(job)["job_state"]:
                raise LabError(reason=_words(directory))
            return refusal
        finally:
            if not self._lab.is_over(job):
                self._lab.exec("ctl", ["scancel", str(job)], check=False)

    def _move(self, job: int, directory: Path) -> str:
        node = self._lab.job(job)["batch_host"]
        asked = self._lab.exec(node, ["gpucr", "checkpoint", str(job), "--requeue"], user=_USER, check=False)
        if asked.status:
            return asked.stderr.strip().removeprefix("gpucr: error: ")
        self._said(job, directory, "gpucr: restored on ")
        return ""

    def _said(self, job: int, directory: Path, text: str) -> None:
        def look() -> bool:
            return text in _output(directory) or self._lab.is_over(job)

        wait_until(look, _LIMIT_S, f"{text.strip()!r} in {directory}/output")
        if text not in _output(directory):
            raise LabError(reason=f"ended before {text.strip()!r}: {_words(directory)}")


def _output(directory: Path) -> str:
    path = directory / "output"
    return path.read_text(errors="replace") if path.exists() else ""


def _words(directory: Path) -> str:
    """The end of what it said, in one line."""
    return " | ".join(_output(directory).strip().splitlines()[-3:])[-400:]


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 when none failed."""
    parser = argparse.ArgumentParser(prog="criu_suite", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs (default: all)")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="jobs at a time (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(args)
    verdicts: list[Verdict] = []
    try:
        with tempfile.TemporaryDirectory(prefix="gpucr-criu-") as name, Lab().at_hand(_NODES) as lab:
            zdtm = unpack(fetch(lab.cache), Path(name))
            build(zdtm)
            chosen = [p for p in programs(zdtm / "static") if not options.only or p.name in options.only]
            suite = Suite(lab, zdtm / "static")
            with ThreadPoolExecutor(options.at_once) as pool:
                for verdict in pool.map(suite.run, chosen):
                    verdicts.append(verdict)
                    print(f"{verdict.name:32} {verdict.what:9} {verdict.why}", flush=True)
    except GpucrError as error:
        print(f"criu_suite: error: {error}", file=sys.stderr)
        return error.exit_code
    counts = Counter(verdict.what for verdict in verdicts)
    print(f"{len(verdicts)} programs: {', '.join(f'{count} {what}' for what, count in sorted(counts.items()))}")
    if options.json:
        print(json.dumps({"counts": counts, "programs": [asdict(verdict) for verdict in verdicts]}))
    return 0 if verdicts and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
