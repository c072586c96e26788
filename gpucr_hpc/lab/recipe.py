"""What the lab's root file system is made of, and the hash that names a build of it. No I/O.

Debian testing, since it has CRIU >= 4.2.1 and Slurm 26.05 next to each other; the headers of trixie's Slurm
24.11 are unpacked beside them, so that the plugin can be built against both.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

PACKAGES = (
    # checkpoint
    "criu", "python3-pycriu", "iproute2", "nftables", "procps", "psmisc", "util-linux", "mount", "tar", "strace",
    # Slurm; libslurm-dev has slurm/spank.h
    "slurmctld", "slurmd", "slurm-client", "libslurm-dev", "munge", "libmunge2",
    # the product
    "python3", "python3-lz4", "python3-cryptography", "python3-typer", "python3-rich", "python3-pyroute2",
    # the C parts, with gcc's AddressSanitizer run time (a dependency of gcc)
    "gcc", "libc6-dev", "make", "libssl-dev", "liblz4-dev",
    # workloads
    "python3-numpy", "mpich", "libmpich-dev",
    # the build steps below
    "passwd", "debian-archive-keyring",
)  # fmt: skip

EXCLUDED_PATHS = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/bug/*",
    "/usr/lib/*/libmpich*.a",
    "/usr/lib/*/libslurm*.a",
)

# Runs on the host with the new root as $1, and the suite in $SUITE and $OLD_SUITE. apt inside the new root
# gets a second set of lists for the older suite, made from its own sources, so that no archive's name is
# written here. dpkg-deb only unpacks: nothing of the older suite is installed.
CUSTOMIZE = r"""#!/bin/sh
set -eu
root=$1
useradd="chroot $root useradd --no-create-home --shell /bin/bash"
chroot "$root" getent group users >/dev/null
$useradd --uid 2001 --gid users --home-dir /shared/home/alice alice
$useradd --uid 2002 --gid users --home-dir /shared/home/bob bob
chroot "$root" useradd --system --uid 990 --user-group --no-create-home --shell /usr/sbin/nologin gpucr

old=$root/tmp/old
mkdir -p "$old/parts" "$old/lists/partial"
for file in "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*; do
    [ -f "$file" ] || continue
    name=$(basename "$file")
    [ "$name" != sources.list ] || name=main.list
    sed "s/\b$SUITE\b/$OLD_SUITE/g" "$file" > "$old/parts/$name"
done
apt="apt-get -q -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/tmp/old/parts
     -o Dir::State::Lists=/tmp/old/lists -o Dir::State::status=/dev/null"
chroot "$root" $apt update
chroot "$root" sh -c "cd /tmp/old && $(echo $apt) -o APT::Sandbox::User=root download libslurm-dev"
chroot "$root" sh -c 'dpkg-deb -x /tmp/old/libslurm-dev_*.deb /tmp/old/unpacked'
mkdir -p "$root/opt/slurm-24.11"
mv "$old/unpacked/usr/include" "$root/opt/slurm-24.11/include"
rm -rf "$old"

rm -f "$root"/etc/munge/munge.key "$root"/etc/machine-id
mkdir -p "$root"/shared "$root"/etc/slurm "$root"/etc/gpucr "$root"/usr/lib/gpucr
mkdir -p "$root"/usr/lib/python3/dist-packages/gpucr_hpc
printf '#!/bin/sh\nexec /usr/bin/python3 -m gpucr_hpc.cli "$@"\n' > "$root/usr/bin/gpucr"
chmod 755 "$root/usr/bin/gpucr"
chroot "$root" apt-get -q clean
rm -rf "$root"/var/lib/apt/lists/*
"""


@dataclass(frozen=True)
class Layer:
    """Packages that only some jobs need: unpacked beside the root file system and laid over it on request.

    Unpacked only, so that no alternative changes: what the root file system has under a common name stays. customize:
    shell commands for what was unpacked, below $1.
    """

    name: str
    packages: tuple[str, ...]
    customize: str = ":"

    def digest(self) -> str:
        """Name of the build beside the root file system that it was made for."""
        return hashlib.sha256(json.dumps([sorted(self.packages), self.customize]).encode()).hexdigest()[:8]


LAYERS = {
    # Open MPI with PRRTE's mpirun, mpi4py and GROMACS, which Debian builds for it. Debian's configuration of Open MPI
    # has it use the loopback interface alone.
    "mpi": Layer(
        "mpi",
        ("openmpi-bin", "python3-mpi4py", "gromacs"),
        "sed -i '/^btl_tcp_if_include/d' $1/etc/openmpi/openmpi-mca-params.conf",
    ),
    # `gpucr doctor --nodes`: Fabric, and servers for it to reach.
    "ssh": Layer("ssh", ("openssh-server", "openssh-client", "python3-fabric")),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is in the root file system; equal recipes give equal names."""

    suite: str = "forky"
    old_suite: str = "trixie"
    variant: str = "apt"
    packages: tuple[str, ...] = PACKAGES
    excluded_paths: tuple[str, ...] = EXCLUDED_PATHS
    customize: str = CUSTOMIZE

    def digest(self) -> str:
        """Name of the build: 16 hex digits over the whole recipe, the order of packages aside."""
        table = asdict(self) | {"packages": sorted(self.packages)}
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def mmdebstrap_argv(
    recipe: Recipe, target: str, hook: str, mirror: str | None, apt_options: tuple[str, ...]
) -> list[str]:
    """The command that builds `recipe` into the directory `target`.

    hook: path of a file that has recipe.customize. mirror: None is mmdebstrap's own default. Valid-Until is
    not checked: testing's Release file may be past its date on a mirror that was frozen.
    """
    argv = [
        "mmdebstrap",
        "--mode=root",
        f"--variant={recipe.variant}",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=Acquire::Check-Valid-Until "false"',
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        "--dpkgopt=force-unsafe-io",
    ]
    argv += [f"--aptopt={option}" for option in apt_options]
    argv += [f"--dpkgopt=path-exclude={path}" for path in recipe.excluded_paths]
    argv += [f'--customize-hook=sh {hook} "$1"', "--", recipe.suite, target]
    return argv + ([mirror] if mirror else [])
