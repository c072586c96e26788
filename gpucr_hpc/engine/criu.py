"""CRIU's command line, version, features, and its errors in words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.config import EngineConfig
from gpucr_hpc.errors import CriuUnusable, ToolMissing
from gpucr_hpc.proc import clean_env, run_async

MINIMUM_VERSION = (4, 2, 1)
HOOK_PROGRAM = "/usr/lib/gpucr/gpucr-hook"
INIT_PROGRAM = "/usr/lib/gpucr/gpucr-init"

# Explanations by a fragment of CRIU's message. Messages change between versions: no decision depends on them,
# only the sentence that a person reads. Source: CRIU 4.2.1, the file named behind each.
_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("anon_inode:[io_uring]", "a process uses io_uring, which cannot be saved; use --checkpoint-io-uring=hide"),
    ("handle_device_vma", "a process has memory of a device mapped (GPU, InfiniBand); use TCP transports"),
    ("Can't handle non-regular mapping", "a process has memory of a device mapped (GPU, InfiniBand)"),
    ("Can't dump file", "a process has an open file of a kind that cannot be saved"),  # files-ext.c
    ("external network namespace", "a process holds a socket made outside the job"),  # net.c
    ("External socket is used", "a process is connected to a Unix socket of a service outside the job"),
    ("half of stream unix", "a process is connected to a Unix socket of a service outside the job"),  # sk-unix.c
    ("Unix socket", "a process holds a Unix socket whose other end is outside the job"),
    ("In-flight connection", "a connection was just being made, or waits for a server to accept it; try again"),
    ("in-flight socket", "a connection waits for a server to accept it, with data or closed again; try again"),
    ("corked dgram", "a UDP socket holds a datagram back (UDP_CORK, MSG_MORE)"),  # sk-inet.c
    ("pending SIGTRAP", "a process blocks a SIGTRAP that is meant for it"),  # cr-dump.c
    ("increase limit", "an open deleted file is larger than engine.ghost_limit_bytes"),  # files-reg.c
    ("has bad size", "a file or library was changed after the checkpoint"),  # files-reg.c
    ("has bad mode", "the permissions of a file were changed after the checkpoint"),
    ("has bad build-id", "a program or library was replaced after the checkpoint"),
    ("No such file or directory", "a file that the job had open is not on this node"),
    ("nested", "a process made namespaces of its own (container, sandbox), which is not supported"),
    ("Unseizable non-zombie", "a debugger or tracer is attached to a process of the job"),  # infect.c
    ("Timeout reached", "the processes did not stop in time (uninterruptible wait on a file system?)"),
    ("CPU instruction capabilities", "this node's processor lacks instructions that the job uses"),
    ("xsave", "this node's processor lacks register state that the job uses"),
    ("Cannot assign requested address", "the address of a socket does not exist on this node"),
    ("Can't fork for", "a process number was taken in the new namespace"),  # cr-restore.c
    ("Unsupported proto", "a socket of a protocol that cannot be saved (MPTCP: GODEBUG=multipathtcp=0)"),
    ("image streamer", "the stream of the image broke off"),
    ("BUG at", "CRIU came upon a case that its authors did not expect"),
    ("No space left", "no space left on a file system"),
    ("Cannot allocate memory", "not enough memory or free huge pages, or the job's memory limit is too small"),
)
# First lines that look like errors and are none.
_NOISE = ("RLIMIT_NOFILE for self", "delete table", "stop page server", "kill page server")


@dataclass(frozen=True)
class CriuInfo:
    """The CRIU of this host: version (major, minor, patch) and the text of it."""

    version: tuple[int, int, int]
    text: str


async def inspect(config: EngineConfig) -> CriuInfo:
    """Check version and kernel features; raise CriuUnusable with what is missing.

    Running `criu check` as plain root also fills CRIU's cache of kernel features, without which it could not
    start under the identity that the engine gives it.
    """
    try:
        shown = await run_async([config.criu, "--version"], timeout_s=20, env=clean_env())
    except ToolMissing:
        raise CriuUnusable(reason=f"{config.criu} is not installed", log="none") from None
    found = re.search(r"Version: (\d+)\.(\d+)(?:\.(\d+))?", shown.stdout)
    if not found:
        raise CriuUnusable(reason=f"no version in the output of {config.criu} --version", log="none")
    version = (int(found[1]), int(found[2]), int(found[3] or 0))
    if version < MINIMUM_VERSION:
        raise CriuUnusable(
            reason=f"version {'.'.join(map(str, version))} is too old, {'.'.join(map(str, MINIMUM_VERSION))} is "
            "the first that works with current kernels",
            log="none",
        )
    checked = await run_async([config.criu, "check", "--no-default-config"], timeout_s=60, env=clean_env())
    if checked.status != 0:
        raise CriuUnusable(reason=explain(checked.stdout + checked.stderr), log="`criu check`")
    return CriuInfo(version, ".".join(map(str, version)))


def program(config: EngineConfig) -> str:
    """CRIU's path; in a capsule no PATH is searched."""
    return shutil.which(config.criu, path=clean_env()["PATH"]) or config.criu


def _common(config: EngineConfig, images: Path, work: Path, log: str, plugins: Path | None = None) -> list[str]:
    return [
        *("--no-default-config", "-D", str(images), "-W", str(work), "-o", log, "-v4", "--stream"),
        *("--libdir", str(plugins or work / "libdir")),  # no plugin of the site may join in unseen
        *("--tcp-established", "--network-lock", "skip", "--manage-cgroups=ignore"),
        *("--ghost-limit", str(config.ghost_limit_bytes), "--file-locks"),
    ]


def dump_argv(config: EngineConfig, root: int, images: Path, work: Path, plugins: Path | None = None) -> list[str]:
    """CRIU's argument list for a dump of the tree below `root` (pid inside the namespace), which runs on after it.
    plugins: folder with the plugins that it loads."""
    return [
        *(program(config), "dump", "-t", str(root), *_common(config, images, work, "dump.log", plugins)),
        "--link-remap",
        *("--timeout", str(config.freeze_timeout_s), "--action-script", HOOK_PROGRAM),
        "--leave-running",
    ]


def enter_argv(capsule: Capsule, argv: Sequence[str]) -> list[str]:
    """Run argv in a capsule's pid, mount and network namespaces; real ids and groups are the user's, effective root."""
    who = ["--uid", str(capsule.uid), "--gid", str(capsule.gid)]
    who += ["--groups", ",".join(map(str, capsule.groups or (capsule.gid,)))]
    return [INIT_PROGRAM, "enter", "--init-pid", str(capsule.init_pid), *who, "--", *argv]


def restore_argv(config: EngineConfig, images: Path, work: Path) -> list[str]:
    """CRIU's argument list for a restore that leaves the tree running as the caller's child."""
    return [program(config), "restore", "-d", *_common(config, images, work, "restore.log")]


def explain(log_text: str) -> str:
    """One sentence for a log or error output: what it means, then CRIU's own last error."""
    errors = [line for line in log_text.splitlines() if "Error" in line and not any(noise in line for noise in _NOISE)]
    if not errors:
        tail = log_text.strip().splitlines()
        return tail[-1].strip() if tail else "CRIU ended without a word"
    for line in errors:
        for fragment, meaning in _EXPLANATIONS:
            if fragment in line:
                return f"{meaning} — {_bare(line)}"
    return _bare(errors[0])


def _bare(line: str) -> str:
    return re.sub(r"^.*?Error \([^)]*\):\s*", "", line).strip()


def explain_file(path: Path) -> str:
    """As `explain`, for a log file that may not exist."""
    try:
        return explain(path.read_text(errors="replace"))
    except OSError:
        return "CRIU wrote no log"
