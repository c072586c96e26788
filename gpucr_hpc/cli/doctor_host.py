"""What protected jobs need of a host besides CRIU: control groups, memory, disk, a network of their own, the plugin.

Each line says what was found and, when it is bad, the line that mends it and what it costs otherwise.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from glob import glob
from pathlib import Path

from gpucr_hpc.capsule import cgroup
from gpucr_hpc.capsule.network import CHOOSE_CONGESTION_CONTROL
from gpucr_hpc.config import Config, NetworkConfig
from gpucr_hpc.engine import copier, stream
from gpucr_hpc.engine.dump import LOG_DIRECTORY
from gpucr_hpc.errors import ToolMissing
from gpucr_hpc.image import native
from gpucr_hpc.proc import clean_env, find_program, run_async
from gpucr_hpc.units import format_bytes

#: What is looked at, whether it is good, what was found, what to do otherwise.
Line = tuple[str, bool, str, str]

PLUGIN = "gpucr.so"
_PROGRAMS = {"nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux", "ip": "iproute2", "tar": "tar"}
_RUN_BYTES, _LOG_BYTES = 16 << 20, 64 << 20
_TRIAL_LIMIT_S = 20.0
# What a capsule's network is made of; it goes with the namespace.
_TRIAL = "ip link add gpucrx type vxlan id 1 dstport {port} && ip link add gpucrv type veth && exec nft -f -"
_RULES = """
table inet gpucr_lock {
  chain output { type filter hook output priority -400; policy drop; }
}
table ip gpucr_nat {
  chain post { type nat hook postrouting priority srcnat; oifname "node" masquerade; }
}
"""


async def examine(config: Config, agent: int | None) -> list[Line]:
    """Lines for this node; agent: pid of its agent, None when there is none."""
    return [
        *programs(),
        control_groups(),
        memory(config.engine.room_percent, agent),
        pipes(stream.pipe_limit()),
        chunks(native.reason),
        await copying(copier.PROGRAM),
        disk(config.agent.run_dir, _RUN_BYTES, "the agent cannot keep the state of its jobs and takes none"),
        disk(str(LOG_DIRECTORY), _LOG_BYTES, "CRIU's log of a checkpoint that failed is lost"),
        await network(config.network),
    ]


def programs() -> list[Line]:
    """Programs of other packages that the agent starts."""
    found: list[Line] = []
    for name, package in _PROGRAMS.items():
        try:
            found.append(("program", True, find_program(name), ""))
        except ToolMissing as error:
            advice = f"apt-get install {package}   # otherwise no job can be protected here"
            found.append(("program", False, str(error), advice))
    return found


def control_groups() -> Line:
    """Whether tasks can be put into the control groups of their steps."""
    found: list[str] = []
    closed: list[str] = []
    for controllers, path in cgroup.memberships(os.getpid()).items():
        point = cgroup.mount_point(controllers)
        if point is not None:
            writable = os.access(point / path.lstrip("/") / "cgroup.procs", os.W_OK)
            (found if writable else closed).append(controllers or "version 2")
    detail = f"kernel {platform.release()}, {'; '.join(found) or 'none to write to'}"
    if closed:
        detail += f"; not to be written: {'; '.join(closed)}"
    advice = "mount -t cgroup2 none /sys/fs/cgroup, writable   # otherwise Slurm's limits do not hold for jobs here"
    return "control groups", bool(found) and not closed, detail, advice


def pipes(limit: int) -> Line:
    """limit: fs.pipe-max-size, which the agent raises where it may."""
    advice = (
        f"sysctl -w fs.pipe-max-size={stream.MEMORY_PIPE_BYTES}   # otherwise jobs stand still longer during "
        "checkpoints; the agent sets it when it starts, unless engine.pipe_limit_bytes is less"
    )
    return "pipes", limit >= stream.MEMORY_PIPE_BYTES, f"up to {format_bytes(limit)}", advice


def chunks(reason: str) -> Line:
    """reason: why images are written and read in Python, empty when they are not."""
    advice = (
        "apt-get install libssl-dev liblz4-dev && make -C spank_plugin install   # otherwise Python writes and reads "
        "images, on machines with many processors at a fraction of the rate"
    )
    return "chunks", not reason or reason.startswith("OpenSSL"), reason or str(native.LIBRARY), advice


async def copying(program: Path) -> Line:
    """program: what moves large memory between jobs and the agent's workers."""
    wanted = copier.READY.decode().strip()
    try:
        found = await run_async([str(program), "--version"], timeout_s=_TRIAL_LIMIT_S, env=clean_env())
        said = found.stdout.strip() or found.stderr.strip()
        problem = "" if said == wanted else f"{program} says {said[:200]!r} instead of {wanted!r}"
    except ToolMissing:
        problem = f"{program} is missing"
    except OSError as error:
        problem = f"{program}: {error.strerror}"
    advice = (
        "make -C spank_plugin install   # otherwise large jobs stand still longer, and come back more slowly, on "
        "machines with many processors"
    )
    return "copier", not problem, problem or str(program), advice


def memory(room_percent: int, agent: int | None) -> Line:
    """Room for what is read from jobs that go on after their checkpoints."""
    kib = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        kib[key] = int(value.split()[0])
    free = kib["MemAvailable"] << 10
    return judge_memory(kib["MemTotal"] << 10, free, free * room_percent // 100, memory_limit(agent))


def judge_memory(total: int, free: int, room: int, limit: int | None) -> Line:
    """All in bytes; limit: of the agent's control group, None for none."""
    detail = f"{format_bytes(free)} of {format_bytes(total)} free, {format_bytes(room)} for what is read of a job"
    if limit is not None:
        detail += f"; the agent may use {format_bytes(limit)}"
    advice = (
        "MemoryMax=infinity in gpucr-agent.service   # otherwise checkpoints of large jobs that go on fail; or choose "
        "a smaller engine.room_percent, and they stand still longer"
    )
    return "memory", limit is None or limit >= room, detail, advice


def memory_limit(pid: int | None) -> int | None:
    """Bytes of memory that a process's own control group may use, None for no limit, or when it is not known."""
    if pid is None:
        return None
    try:
        groups = cgroup.memberships(pid)
    except OSError:
        return None
    for controllers, path in groups.items():
        if controllers and "memory" not in controllers.split(","):
            continue
        point = cgroup.mount_point(controllers)
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        try:
            text = (point / path.lstrip("/") / name).read_text().strip() if point is not None else ""
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for none
            return int(text)
    return None


def disk(path: str, least_bytes: int, cost: str) -> Line:
    """Whether a directory of the agent's, which it makes itself, has room."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    writable = os.access(place, os.W_OK)
    detail = f"{path}: {format_bytes(free)} free" if writable else f"{path}: not to be written"
    return "disk", writable and free >= least_bytes, detail, f"make room there, writable for root   # otherwise {cost}"


async def network(config: NetworkConfig) -> Line:
    """Make, in a namespace that ends at once, what the network of a job is made of."""
    said = await _trial(_TRIAL.format(port=config.vxlan_port))
    if said:
        advice = "modprobe -a vxlan veth nf_tables nft_chain_nat   # otherwise jobs run without protection"
        return "network", False, f"a namespace with VXLAN, veth and nftables cannot be made: {said}", advice
    detail, names = "VXLAN, veth, nftables", config.congestion_control
    if names and await _trial(CHOOSE_CONGESTION_CONTROL, *names):
        advice = 'network.congestion_control = ["reno"]   # otherwise TCP in jobs of several nodes is as the node\'s'
        return "network", False, f"{detail}; jobs may use no congestion control of {', '.join(names)}", advice
    return "network", True, detail, ""


async def _trial(script: str, *args: str) -> str:
    """Run a shell's script in a network namespace of its own; why it failed."""
    try:
        argv = ["unshare", "--net", "sh", "-c", script, "sh", *args]
        done = await run_async(argv, stdin=_RULES, timeout_s=_TRIAL_LIMIT_S, env=clean_env())
    except ToolMissing as error:
        return str(error)
    return (done.stderr.strip() or f"status {done.status}").splitlines()[0] if done.status else ""


def plugin(live: Mapping[str, str]) -> Line:
    """Whether slurmd and sbatch on this node load the plugin. live: slurm.conf, keys in lower case."""
    stack = Path(live.get("plugstackconfig", "/etc/slurm/plugstack.conf"))
    if not stack.exists():  # slurmd that got its configuration from slurmctld
        stack = Path("/run/slurm/conf") / stack.name
    advice = f"optional /usr/lib/gpucr/{PLUGIN} in {stack}   # otherwise sbatch knows none of the options of gpucr"
    for words in _stack_lines(stack, depth=5):
        if len(words) < 2 or Path(words[1]).name != PLUGIN:
            continue
        places = [Path(words[1])]
        if not places[0].is_absolute():
            places = [Path(place, words[1]) for place in live.get("plugindir", "/usr/lib/slurm").split(":")]
        there = any(place.is_file() for place in places)
        detail = f"{stack}: {' '.join(words)}" + ("" if there else ": no such file on this node")
        return "plugin", there, detail, f"make -C spank_plugin all install   # {advice.partition('# ')[2]}"
    return "plugin", False, f"{stack} has no line with {PLUGIN}", advice


def _stack_lines(path: Path, depth: int) -> list[list[str]]:
    """Words of the lines of a plugstack.conf and of the files that it includes."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[list[str]] = []
    for words in (line.partition("#")[0].split() for line in lines):
        if words and words[0] == "include" and len(words) > 1:
            names = sorted(glob(str(path.parent / words[1]))) if depth else []
            found += [line for name in names for line in _stack_lines(Path(name), depth - 1)]
        elif words:
            found.append(words)
    return found
