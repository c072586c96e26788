"""The lab: a real Slurm cluster of network namespaces on one host. Root only; standard library only.

State is in /var/lib/gpucr-lab ($GPUCR_LAB): lab.json (what is up), keys/, shared/ (the parallel file system),
plugin/ (bind-mounted as /usr/lib/gpucr), nodes/NAME/{upper,work,root,console.log,pid}. Only the nodes'
processes hold mounts and namespaces, so ending these ends everything but links, cgroup directories and the
state directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpucr_hpc.errors import LabError
from gpucr_hpc.lab import conf, host, plugin, rootfs
from gpucr_hpc.lab.leftovers import leftovers_of
from gpucr_hpc.lab.nodes import CHECKOUT, USERS, Nodes, Running, account
from gpucr_hpc.lab.recipe import LAYERS, Recipe
from gpucr_hpc.lab.wait import wait_until

_LOCK = Path("/run/lock/gpucr-lab.lock")


def default_state() -> Path:
    """$GPUCR_LAB, else /var/lib/gpucr-lab. Not on an overlay: it holds the upper directories of overlays."""
    return Path(os.environ.get("GPUCR_LAB", "/var/lib/gpucr-lab"))


class Lab(Nodes):
    """One lab. say: called with a line for people at each step."""

    def __init__(self, state: Path | None = None, say: Callable[[str], None] | None = None) -> None:
        super().__init__(state or default_state(), say or (lambda _: None))
        self.cache = rootfs.CACHE
        self.recipe = Recipe()

    # --- up and down --------------------------------------------------------------------------------------

    def build(self) -> Path:
        """The root file system, built if need be."""
        self._need_root()
        with self._step("host tools"):
            installed = rootfs.install_host_tools(built=rootfs.path_of(self.recipe, self.cache).is_dir())
            if installed:
                self._say(f"  installed {', '.join(installed)}")
        running = self.running()
        with self._step("root file system"):
            return rootfs.ensure(self.recipe, self._say, self.cache, (Path(running.rootfs),) if running else ())

    def layer(self, name: str) -> Path:
        """The files of a layer in recipe.LAYERS for the root file system, which is there; fetched if need be."""
        return rootfs.ensure_layer(self.recipe, LAYERS[name], self._say, self.cache)

    def up(
        self,
        nodes: int = 4,
        settings: Sequence[str] = (),
        *,
        fresh: bool = False,
        with_plugin: bool = True,
        layers: Sequence[str] = (),
    ) -> None:
        """Start the lab, or see that it is up; returns when Slurm says that every node can take jobs.

        settings: KEY=VALUE for slurm.conf (conf.SlurmConf). fresh: end a running lab first. layers:
        names in recipe.LAYERS, of more programs for jobs. A running lab with other nodes or settings, or without these
        layers, is an error, since jobs may run in it. Nodes that were killed are started
        again, and the rests of a start that was cut off are removed. LabError with the log's end when a
        daemon died.
        """
        names = conf.node_names(nodes)
        wanted = (tuple(names), tuple(settings))
        memory_mb = max(512, min(host.memory_mb() * 8 // 10, 16384))
        slurm_conf = conf.SlurmConf(wanted[0], memory_mb=memory_mb, settings=conf.parse_settings(settings))
        slurm_conf.render()  # refuses bad settings before anything is touched
        unknown = set(layers) - set(LAYERS)
        if unknown:
            raise LabError(reason=f"no layer {sorted(unknown)[0]!r}; there are: {', '.join(LAYERS)}")
        system = self.build()
        over = tuple(str(self.layer(name)) for name in layers)
        with self._locked():
            running = self.running()
            if running is not None and (fresh or self.pid(conf.CONTROLLER) is None):
                self._down()
                running = None
            built = None
            if with_plugin:
                with self._step("C parts"):
                    built = plugin.build(CHECKOUT / "spank_plugin", system, self.cache)
            if running is not None:
                if (running.nodes, running.settings) != wanted:
                    was = f"{len(running.nodes)} nodes, settings {list(running.settings)}"
                    raise LabError(reason=f"is up with {was}: --fresh starts it anew")
                if not set(over) <= set(running.layers):
                    raise LabError(reason=f"is up without the layer {' '.join(layers)}: --fresh starts it anew")
                self._say(f"already up with {nodes} nodes")
                if running.rootfs != str(system):
                    self._say("  with an older root file system: --fresh takes the new one")
            else:
                self._clean()
                self._prepare(slurm_conf, Running(*wanted, rootfs=str(system), layers=over))
            self._install_plugin(built)
            missing = [name for name in (conf.CONTROLLER, *names) if self.pid(name) is None]
            if missing:
                with self._step(f"start {' '.join(missing)}"), ThreadPoolExecutor(len(missing)) as pool:
                    list(pool.map(self._boot, missing))
            with self._step("Slurm ready"):
                self.wait_ready(names)
            with self._step("agents ready"):
                self.wait_agents(names)

    @contextmanager
    def at_hand(self, nodes: int) -> Iterator[Lab]:
        """The lab that is up, if it is this checkout's (LabError else), or one of so many nodes that is started now and
        taken down at the end."""
        was_up = self.running() is not None
        try:
            if not was_up:
                self.up(nodes)
            self.need_own_checkout()
            yield self
        finally:
            if not was_up:
                self.down()

    def down(self) -> None:
        """End the lab and remove everything but the cache; also what a start that was cut off left."""
        self._need_root()
        with self._locked(), self._step("down"):
            self._down()

    def _down(self) -> None:
        self._clean()
        if self.state.exists():
            shutil.rmtree(self.state)

    def _clean(self) -> None:
        """Kill all nodes that have a pid file, then remove links and cgroup directories. LabError if the
        links are another lab's.
        """
        owner = host.bridge_owner()
        if owner and owner != str(self.state) and Path(owner, "lab.json").exists():
            raise LabError(reason=f"another lab is up in {owner}: GPUCR_LAB={owner} scripts/lab down")
        names = sorted(path.name for path in (self.state / "nodes").glob("*"))
        for name in names:
            self._kill(name)
        for link in host.links():
            host.delete_link(link)
        host.remove_cgroup_parent()

    def _prepare(self, slurm_conf: conf.SlurmConf, running: Running) -> None:
        """A state directory for a first start. Keys, and the users' files of a crashed lab, are kept."""
        for name in ("nodes", "keys", "plugin", "shared/home", "shared/gpucr"):
            (self.state / name).mkdir(parents=True, exist_ok=True)
        (self.state / "keys").chmod(0o700)
        for name in ("site.key", "signing.key", "munge.key"):
            path = self.state / "keys" / name
            if not path.exists():
                path.write_bytes(os.urandom(128 if name == "munge.key" else 32))
        for user, uid in USERS.items():
            home = self.state / "shared/home" / user
            home.mkdir(exist_ok=True)
            os.chown(home, uid, 100)
        uid, gid = account(Path(running.rootfs), conf.STORE_USER)
        os.chown(self.state / "shared/gpucr", uid, gid)
        (self.state / "shared/gpucr").chmod(0o700)
        (self.state / "slurm.conf").write_text(slurm_conf.render())
        host.make_bridge(str(self.state))
        table = {"nodes": running.nodes, "settings": running.settings, "rootfs": running.rootfs}
        table["layers"] = running.layers
        temporary = self.state / "lab.json.new"
        temporary.write_text(json.dumps(table) + "\n")
        temporary.rename(self.state / "lab.json")

    def _install_plugin(self, built: Path | None) -> None:
        """Put a build of the C parts into all nodes; Slurm reads plugstack.conf at each command and step."""
        changed = plugin.install(built, self.state / "plugin")
        if changed:
            self._say("  C parts installed" if built else "  no C parts")
        text = conf.plugstack_conf(built is not None)
        for name in self.nodes():
            pid = self.pid(name)
            if pid is not None:
                Path(f"/proc/{pid}/root/etc/slurm/plugstack.conf").write_text(text)

    def refresh(self) -> None:
        """Take over what changed in the checkout: build and install the C parts, restart the agents."""
        running = self._need_running()
        with self._locked():
            with self._step("C parts"):
                built = plugin.build(CHECKOUT / "spank_plugin", Path(running.rootfs), self.cache)
                self._install_plugin(built)
            with self._step("agents restarted"):
                for name in running.nodes:
                    if self.pid(name) is not None:
                        self._restart_agent(name)
                self.wait_agents([name for name in running.nodes if self.pid(name) is not None])

    def _restart_agent(self, node: str) -> None:
        """Kill the agent; the node's init starts it again, as systemd would."""
        old = self.daemons(node).get("agent")
        if old is not None:
            self.exec(node, ["kill", "-KILL", str(old)], check=False)
            wait_until(lambda: self.daemons(node).get("agent", old) != old, 10, f"a new agent on {node}")

    def kill(self, node: str) -> None:
        """Power loss: the node's network goes, then all its processes at once, and what was mounted with
        them.

        Its disk (the overlay's upper directory) stays for `start`.
        """
        self._need_pid(node)
        with self._locked():
            self._kill(node)

    def start(self, node: str) -> None:
        """Switch a node on again and wait until Slurm sees it idle."""
        self._need_running()
        if self.pid(node) is not None:
            raise LabError(reason=f"{node} is on")
        with self._locked():
            self._boot(node)
        names = [node] if node != conf.CONTROLLER else [name for name in self.nodes()[1:] if self.pid(name)]
        self.wait_ready(names)
        self.wait_agents(names)

    def leftovers(self, settle_s: float = 3.0, ignore: Collection[str] = ()) -> list[str]:
        """What should not be in any node while no job runs, but for the lines in `ignore`; see leftovers_of.

        Looks again until settle_s is over: Slurm's and the agent's clean-up goes on for a moment after a
        job's end.
        """
        deadline = time.monotonic() + settle_s
        while True:
            on = [node for node in self.nodes() if self.pid(node)]
            found = [line for node in on for line in leftovers_of(self, node) if line not in ignore]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    # --- helpers ------------------------------------------------------------------------------------------

    def _need_root(self) -> None:
        if os.geteuid() != 0:
            raise LabError(reason="needs root (namespaces, mounts, cgroups)")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time on one machine, or in one box, which has a /run of its own."""
        _LOCK.parent.mkdir(parents=True, exist_ok=True)
        with _LOCK.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._say(f"{what}: {time.monotonic() - start:.1f} s")
