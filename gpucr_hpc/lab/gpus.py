"""GPUs of the host for the lab's nodes, asked for with `--set GresTypes=gpu --set node.Gres=gpu:N`.

Every node sees every card, and has them all in its gres.conf: nodes of one machine share its cards, and a job can be
moved from one to the other. The host's programs and libraries are below /host in a node, and the driver's libraries
where the node's loader looks for them; a program of the host is run there with the host's own loader (`HOST_LOADER`).
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from gpucr_hpc import proc

#: Directories of the host that a node has below /host.
HOST_DIRECTORIES = ("/usr", "/opt")
HOST_LOADER = (
    "/host/usr/lib64/ld-linux-x86-64.so.2",
    "--library-path",
    "/host/usr/lib/x86_64-linux-gnu:/host/usr/local/nvidia/lib64",
)
_LIBRARIES = ("libcuda.so", "libnvidia-")


def wanted(settings: Sequence[str]) -> bool:
    """Whether the lab's settings ask for GPUs."""
    return any(line.partition("=")[0].lower() == "grestypes" and "gpu" in line for line in settings)


def devices(dev: Path = Path("/dev")) -> dict[str, list[int]]:
    """NVIDIA's devices on the host, by their path below /dev: major and minor number."""
    found = {}
    for path in sorted([*dev.glob("nvidia*"), *dev.glob("nvidia-caps/*")]):
        info = path.stat()
        if stat.S_ISCHR(info.st_mode):
            found[str(path.relative_to(dev))] = [os.major(info.st_rdev), os.minor(info.st_rdev)]
    return found


def gres_conf(names: Sequence[str]) -> str:
    """gres.conf of every node; names: of the devices."""
    cards = [name for name in names if name.removeprefix("nvidia").isdigit()]
    return "".join(f"Name=gpu File=/dev/{card}\n" for card in cards)


def links() -> dict[str, str]:
    """Links of a node to the driver's libraries and nvidia-smi of the host."""
    return library_links(proc.run(["ldconfig", "-p"]).stdout) | program_links()


def library_links(cache: str) -> dict[str, str]:
    """cache: what `ldconfig -p` says. The first path of a name counts, as for the loader."""
    found: dict[str, str] = {}
    for line in cache.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        name = name.split(" ")[0]
        if arrow and name.startswith(_LIBRARIES) and Path(path).is_relative_to("/usr"):
            found.setdefault(f"/usr/lib/x86_64-linux-gnu/{name}", f"/host{path}")
    return found


def program_links() -> dict[str, str]:
    """nvidia-smi, when the host has it."""
    program = shutil.which("nvidia-smi")
    return {"/usr/bin/nvidia-smi": f"/host{Path(program).resolve()}"} if program else {}
