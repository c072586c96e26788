"""Builds and finds the lab's root file system, cached below /var/cache/gpucr-lab by the hash of its recipe.

A build goes to a temporary name and is renamed when it is whole: what has the final name is complete. Builds
of other recipes and the rests of interrupted ones are removed by the next build, but for one that a running
lab has as its lower directory (an overlay whose lower directory changes is undefined).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError, ToolFailed
from gpucr_hpc.lab.recipe import Layer, Recipe, mmdebstrap_argv

CACHE = Path("/var/cache/gpucr-lab")
_HOST_TOOLS = {"mmdebstrap": "mmdebstrap", "ip": "iproute2", "nsenter": "util-linux", "ps": "procps"}
_BUILD_TOOLS = frozenset({"mmdebstrap"})
_BUILD_LIMIT_S = 1800


def install_host_tools(*, built: bool = False) -> list[str]:
    """Install what the lab runs on the host and is not there, with apt-get; return the packages installed.

    built: the root file system is there, and what only builds it is not needed.
    """
    wanted = {tool: package for tool, package in _HOST_TOOLS.items() if not (built and tool in _BUILD_TOOLS)}
    missing = sorted({package for tool, package in wanted.items() if shutil.which(tool) is None})
    if missing:
        if shutil.which("apt-get") is None:
            raise LabError(reason=f"needs {', '.join(missing)}, and this host has no apt-get to install them")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        proc.run(["apt-get", "-q", "update"], env=env)
        install = ["apt-get", "-q", "-y", "--no-install-recommends", "install", *missing]
        proc.run(install, env=env).check()
    return missing


def debian_mirror() -> str | None:
    """The archive this host takes Debian from, or None (mmdebstrap then takes its default).

    `apt-get indextargets` reads both kinds of source files. The label comes from the Release file and is
    missing before the first `apt-get update`: the path's end decides then.
    """
    form = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(LABEL)\t$(CREATED_BY)"
    if shutil.which("apt-get") is None:
        return None
    return pick_mirror(proc.run(["apt-get", "indextargets", "--format", form]).stdout)


def pick_mirror(targets: str) -> str | None:
    """The first Debian archive that `apt-get indextargets` lists: main, not updates, not security."""
    for line in targets.splitlines():
        uri, release, component, label, kind = (line.split("\t") + [""] * 5)[:5]
        if kind != "Packages" or component != "main" or "-" in release or "/" in release:
            continue
        if label == "Debian" or ("$(" in label and uri.rstrip("/").endswith("/debian")):
            return uri.rstrip("/")
    return None


def apt_proxy_options() -> tuple[str, ...]:
    """The host's own proxy settings for apt, in a form that --aptopt takes."""
    if shutil.which("apt-config") is None:
        return ()
    dump = proc.run(["apt-config", "dump"]).stdout
    found = re.findall(r'^(Acquire::\w+::Proxy[\w:.-]*) "(.+)";$', dump, re.MULTILINE | re.IGNORECASE)
    return tuple(f'{key} "{value}"' for key, value in found)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One build at a time; the lock goes with its holder, so nothing can be left locked."""
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def path_of(recipe: Recipe, cache: Path = CACHE) -> Path:
    """Where the root file system of `recipe` is, or will be."""
    return cache / recipe.digest() / "rootfs"


def ensure(recipe: Recipe, say: Callable[[str], None], cache: Path = CACHE, keep: tuple[Path, ...] = ()) -> Path:
    """The root file system of `recipe`, built first if it is not in the cache.

    keep: root file systems that a running lab uses. Raises LabError with the end of the build's log.
    """
    rootfs = path_of(recipe, cache)
    if rootfs.is_dir():
        return rootfs
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache):
        if not rootfs.is_dir():
            _remove(cache, r"building\.\w+", keep)
            _build(recipe, rootfs, say, cache)
            _remove(cache, "[0-9a-f]{16}", (*keep, rootfs))
    return rootfs


def _remove(cache: Path, pattern: str, keep: tuple[Path, ...]) -> None:
    for entry in cache.iterdir():
        if re.fullmatch(pattern, entry.name) and entry / "rootfs" not in keep:
            shutil.rmtree(entry)


def _build(recipe: Recipe, rootfs: Path, say: Callable[[str], None], cache: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix="building.", dir=cache))
    work.chmod(0o755)
    hook = work / "customize"
    hook.write_text(recipe.customize)
    mirror = debian_mirror()
    argv = mmdebstrap_argv(recipe, str(work / "rootfs"), str(hook), mirror, apt_proxy_options())
    say(f"building Debian {recipe.suite} with {len(recipe.packages)} packages (1-4 minutes, once)")
    env = proc.clean_env({"SUITE": recipe.suite, "OLD_SUITE": recipe.old_suite, "TMPDIR": str(work)})
    env |= {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")}
    done = proc.run(argv, env=env, timeout_s=_BUILD_LIMIT_S)
    log = cache / "build.log"
    log.write_text(done.stdout + done.stderr)
    try:
        done.check()
    except ToolFailed as error:
        shutil.rmtree(work, ignore_errors=True)
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise LabError(reason=f"the root file system could not be built, see {log}:\n{tail}") from error
    work.rename(rootfs.parent)


def ensure_layer(recipe: Recipe, layer: Layer, say: Callable[[str], None], cache: Path = CACHE) -> Path:
    """The layer's files for the root file system of `recipe`, which is there; fetched first if they are not."""
    rootfs = path_of(recipe, cache)
    target = rootfs.parent / f"layer-{layer.name}-{layer.digest()}"
    if target.is_dir():
        return target
    with _locked(cache):
        if not target.is_dir():
            _fetch_layer(recipe, layer, rootfs, target, say)
    return target


def _fetch_layer(recipe: Recipe, layer: Layer, rootfs: Path, target: Path, say: Callable[[str], None]) -> None:
    """Download with the host's apt what is missing in the root file system, and unpack it."""
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    for name in ("lists/partial", "archives/partial", "root"):
        (work / name).mkdir(parents=True)
    say(f"fetching {', '.join(layer.packages)} (once)")
    options = [
        f"Dir::State::Lists={work}/lists", f"Dir::State::status={rootfs}/var/lib/dpkg/status",
        f"Dir::Cache={work}", f"Dir::Cache::Archives={work}/archives",
        f"Dir::Etc::SourceList={rootfs}/etc/apt/sources.list", f"Dir::Etc::SourceParts={rootfs}/etc/apt/sources.list.d",
        "APT::Sandbox::User=root", "Acquire::Check-Valid-Until=false", "Acquire::Languages=none",
    ]  # fmt: skip
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        proc.run([*apt, "update"], env=env, timeout_s=_BUILD_LIMIT_S).check()
        install = [*apt, "-y", "--no-install-recommends", "--download-only", "install", *layer.packages]
        proc.run(install, env=env, timeout_s=_BUILD_LIMIT_S).check()
        for package in sorted((work / "archives").glob("*.deb")):
            proc.run(["dpkg-deb", "-x", str(package), str(work / "root")], timeout_s=_BUILD_LIMIT_S).check()
        proc.run(["sh", "-ec", layer.customize, "sh", str(work / "root")]).check()
        _remove_excluded(work / "root", recipe.excluded_paths)
        (work / "root").rename(target)
    except ToolFailed as error:
        raise LabError(reason=f"the layer {layer.name!r} could not be fetched: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_excluded(root: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in root.glob(pattern.lstrip("/")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
