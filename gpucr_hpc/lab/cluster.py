"""The lab: a real Slurm cluster of network namespaces on one host. Root only; standard library only.

State is in /var/lib/gpucr-lab ($GPUCR_LAB): lab.json (what is up), keys/, shared/ (the parallel file system), plugin/
(bind-mounted as /usr/lib/gpucr), nodes/NAME/{upper,work,root,console.log,pid}. Only the nodes' processes hold mounts
and namespaces, so ending these ends everything but links, cgroup directories and the state directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab import conf, host, plugin, rootfs
from gpucr_hpc.lab.boot import NodeFile, NodeSpec
from gpucr_hpc.lab.leftovers import leftovers_of
from gpucr_hpc.lab.recipe import Recipe
from gpucr_hpc.lab.slurm import SlurmCommands
from gpucr_hpc.lab.wait import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
_READY_STATES = {"idle", "mixed", "allocated", "completing"}
_READY_LIMIT_S = 60.0
_LOG_TAIL_LINES = 15
_USERS = {"alice": 2001, "bob": 2002}
_NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Running:
    """lab.json: what the last `up` started."""

    nodes: tuple[str, ...]
    settings: tuple[str, ...]
    rootfs: str


class Lab(SlurmCommands):
    """One lab. say: called with a line for people at each step."""

    def __init__(self, state: Path | None = None, say: Callable[[str], None] | None = None) -> None:
        self.state = state or Path(os.environ.get("GPUCR_LAB", "/var/lib/gpucr-lab"))
        self.cache = rootfs.CACHE
        self.recipe = Recipe()
        self._say = say or (lambda _: None)

    # --- up and down --------------------------------------------------------------------------------------

    def build(self) -> Path:
        """The root file system, built if need be."""
        self._need_root()
        with self._step("host tools"):
            installed = rootfs.install_host_tools()
            if installed:
                self._say(f"  installed {', '.join(installed)}")
        running = self.running()
        with self._step("root file system"):
            return rootfs.ensure(
                self.recipe, self._say, self.cache, (Path(running.rootfs),) if running else ()
            )

    def up(
        self, nodes: int = 4, settings: Sequence[str] = (), *, fresh: bool = False, with_plugin: bool = True
    ) -> None:
        """Start the lab, or see that it is up; returns when Slurm says that every node can take jobs.

        settings: KEY=VALUE for slurm.conf (conf.SlurmConf). fresh: end a running lab first. A running lab with other
        nodes or settings is an error, since jobs may run in it. Nodes that were killed are started again, and the rests
        of a start that was cut off are removed. LabError with the log's end when a daemon died.
        """
        names = conf.node_names(nodes)
        wanted = (tuple(names), tuple(settings))
        memory_mb = max(512, min(host.memory_mb() * 8 // 10, 16384))
        slurm_conf = conf.SlurmConf(wanted[0], memory_mb=memory_mb, settings=conf.parse_settings(settings))
        slurm_conf.render()  # refuses bad settings before anything is touched
        system = self.build()
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
                self._say(f"already up with {nodes} nodes")
            else:
                self._clean()
                self._prepare(slurm_conf, Running(*wanted, rootfs=str(system)))
            self._install_plugin(built)
            missing = [name for name in (conf.CONTROLLER, *names) if self.pid(name) is None]
            if missing:
                with self._step(f"start {' '.join(missing)}"), ThreadPoolExecutor(len(missing)) as pool:
                    list(pool.map(self._boot, missing))
            with self._step("Slurm ready"):
                self.wait_ready(names)
            with self._step("agents ready"):
                self.wait_agents(names)

    def down(self) -> None:
        """End the lab and remove everything but the cache; also what a start that was cut off left."""
        self._need_root()
        with self._locked(), self._step("down"):
            self._down()

    def _down(self) -> None:
        self._clean()
        shutil.rmtree(self.state, ignore_errors=False) if self.state.exists() else None

    def _clean(self) -> None:
        """Kill all nodes that have a pid file, then remove links and cgroup directories. LabError if the links are
        another lab's."""
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
        for user, uid in _USERS.items():
            home = self.state / "shared/home" / user
            home.mkdir(exist_ok=True)
            os.chown(home, uid, 100)
        uid, gid = self._account(Path(running.rootfs), conf.STORE_USER)
        os.chown(self.state / "shared/gpucr", uid, gid)
        (self.state / "shared/gpucr").chmod(0o700)
        (self.state / "slurm.conf").write_text(slurm_conf.render())
        host.make_bridge(str(self.state))
        table = {"nodes": running.nodes, "settings": running.settings, "rootfs": running.rootfs}
        temporary = self.state / "lab.json.new"
        temporary.write_text(json.dumps(table) + "\n")
        temporary.rename(self.state / "lab.json")

    @staticmethod
    def _account(system: Path, user: str) -> tuple[int, int]:
        for line in (system / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[0] == user:
                return int(fields[2]), int(fields[3])
        raise LabError(reason=f"no user {user} in {system}")

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
                    pid = self.daemons(name).get("agent")
                    if pid is not None:
                        self.exec(name, ["kill", "-KILL", str(pid)], check=False)
                        wait_until(lambda n=name, p=pid: self.daemons(n).get("agent") not in (None, p), 10, f"agent of {name}")  # type: ignore[misc]
                self.wait_agents(list(running.nodes))

    # --- nodes --------------------------------------------------------------------------------------------

    def running(self) -> Running | None:
        """What lab.json says, or None when no lab is up."""
        try:
            table = json.loads((self.state / "lab.json").read_text())
        except FileNotFoundError:
            return None
        return Running(tuple(table["nodes"]), tuple(table["settings"]), table["rootfs"])

    def nodes(self) -> list[str]:
        """All nodes, ctl first; empty when no lab is up."""
        running = self.running()
        return [conf.CONTROLLER, *running.nodes] if running else []

    def pid(self, node: str) -> int | None:
        """The host's pid of a node's PID 1, or None when the node is off."""
        return host.read_pid(self.state / "nodes" / node / "pid")

    def root(self, node: str) -> Path:
        """The node's root directory as the host can reach it, its mounts included."""
        return Path(f"/proc/{self._need_pid(node)}/root")

    def pids(self, node: str) -> list[int]:
        """The host's pids of all processes in a node."""
        return [task.pid for task in host.tasks_of(self._need_pid(node))]

    def daemons(self, node: str) -> dict[str, int]:
        """The node's daemons that run: name to pid, as the node counts them."""
        found = {}
        for path in (self.root(node) / "run/lab").glob("*.pid"):
            try:
                found[path.stem] = int(path.read_text())
            except (OSError, ValueError):
                continue  # it ended, or is being started, at this moment
        return found

    def _boot(self, node: str) -> None:
        work = self.state / "nodes" / node
        work.mkdir(parents=True, exist_ok=True)
        running = self._need_running()
        spec = NodeSpec(
            name=node,
            role=conf.CONTROLLER if node == conf.CONTROLLER else "node",
            address=conf.address(node),
            prefix_length=conf.PREFIX_LENGTH,
            gateway=conf.BRIDGE_ADDRESS,
            bridge=host.BRIDGE,
            link=host.link_of(node),
            rootfs=running.rootfs,
            work_dir=str(work),
            shared=str(self.state / "shared"),
            package=str(CHECKOUT / "gpucr_hpc"),
            plugin=str(self.state / "plugin"),
            pid_file=str(work / "pid"),
            cgroup_version=host.cgroup_version(),
            files=self._files(node, running),
        )
        env = proc.clean_env({"PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"})
        done = proc.run(
            [shutil.which("python3") or "python3", "-m", "gpucr_hpc.lab.boot"], stdin=spec.to_json(), env=env, cwd="/"
        )
        if done.status != 0:
            raise LabError(reason=f"{node} could not be started: {done.stderr.strip()}")

    def _files(self, node: str, running: Running) -> dict[str, NodeFile]:
        keys = self.state / "keys"
        built = (self.state / "plugin/gpucr.so").exists()
        texts = {
            "/etc/hostname": f"{node}\n",
            "/etc/hosts": conf.hosts(running.nodes),
            "/etc/slurm/slurm.conf": (self.state / "slurm.conf").read_text(),
            "/etc/slurm/cgroup.conf": conf.cgroup_conf(host.cgroup_version()),
            "/etc/slurm/plugstack.conf": conf.plugstack_conf(built),
            "/etc/gpucr/gpucr.toml": conf.gpucr_toml(),
        }
        files = {path: NodeFile(text.encode()) for path, text in texts.items()}
        files["/etc/munge/munge.key"] = NodeFile((keys / "munge.key").read_bytes(), 0o400, "munge")
        for name in ("site.key", "signing.key"):
            files[f"/etc/gpucr/keys/{name}"] = NodeFile((keys / name).read_bytes(), 0o600)
        return files

    def kill(self, node: str) -> None:
        """Power loss: the node's network goes, then all its processes at once; what it had mounted goes with them.

        Its disk (the overlay's upper directory) stays for `start`.
        """
        self._need_pid(node)
        self._kill(node)

    def _kill(self, node: str) -> None:
        pid = self.pid(node)
        if host.link_of(node) in host.links():
            host.delete_link(host.link_of(node))
        if pid is not None:
            doomed = {task.pid for task in host.tasks_of(pid)}
            namespace = host.all_tasks()[pid].pid_namespace
            host.kill_if_there(pid)

            def gone() -> bool:
                left = [
                    task
                    for task in host.all_tasks().values()
                    if task.state != "Z" and (task.pid in doomed or task.pid_namespace == namespace)
                ]
                for task in left:
                    host.kill_if_there(task.pid)
                host.thaw(node)
                return not left

            wait_until(gone, 20, f"the end of {node}'s processes")
        (self.state / "nodes" / node / "pid").unlink(missing_ok=True)
        wait_until(lambda: host.remove_cgroups(node), 20, f"the end of {node}'s cgroups")

    def start(self, node: str) -> None:
        """Switch a node on again and wait until Slurm sees it idle."""
        self._need_running()
        if self.pid(node) is not None:
            raise LabError(reason=f"{node} is on")
        self._boot(node)
        names = [node] if node != conf.CONTROLLER else [name for name in self.nodes()[1:] if self.pid(name)]
        self.wait_ready(names)
        self.wait_agents(names)

    # --- readiness ----------------------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """Slurm's state of every compute node (`idle`, `down*` ...); empty when slurmctld does not answer."""
        done = self.exec(conf.CONTROLLER, ["sinfo", "-h", "-N", "-o", "%N %T"], check=False)
        return dict(line.split(None, 1) for line in done.stdout.splitlines()) if done.status == 0 else {}

    def wait_ready(self, names: Sequence[str], timeout_s: float = _READY_LIMIT_S) -> None:
        """Wait until Slurm can use these nodes; LabError at once, with its log, when a daemon ended."""

        def ready() -> bool:
            for node in (conf.CONTROLLER, *names):
                self._raise_if_died(node, ("munged", "slurmctld", "slurmd"))
            if "slurmctld" not in self.daemons(conf.CONTROLLER):
                return False
            states = self.node_states()
            return all(states.get(name) in _READY_STATES for name in names)

        wait_until(ready, timeout_s, f"Slurm to have {', '.join(names)} ready (`scripts/lab logs ctl`)")

    def wait_agents(self, names: Sequence[str], timeout_s: float = 20.0) -> None:
        """Wait until the agents run and have their sockets; nothing to wait for when the checkout has none yet."""
        if not any((CHECKOUT / "gpucr_hpc" / path).exists() for path in ("agent/__main__.py", "agent.py")):
            self._say("  no agent in this checkout yet")
            return

        def ready() -> bool:
            for node in names:
                self._raise_if_died(node, ("agent",), ", the rest of the lab is up")
            return all(self.agent_ready(node) for node in names)

        wait_until(ready, timeout_s, "the agents (`scripts/lab logs n1`)")

    def agent_ready(self, node: str) -> bool:
        """Does the node's agent run and listen (any socket below /run/gpucr)?"""
        pid = self.daemons(node).get("agent")
        sockets = self.root(node) / "run/gpucr"
        return pid is not None and any(path.is_socket() for path in sockets.glob("*"))

    def _raise_if_died(self, node: str, names: Sequence[str], but: str = "") -> None:
        console = self.state / "nodes" / node / "console.log"
        if self.pid(node) is None:
            raise LabError(reason=f"{node} went off:\n{_tail(console)}")
        for name in names:
            if (self.root(node) / f"run/lab/{name}.exit").exists():
                logs = [self.log_dir(node) / f"{name}.{kind}" for kind in ("stderr", "log")]
                text = next((tail for tail in map(_tail, logs) if tail), "(it wrote nothing)")
                raise LabError(reason=f"{name} of {node} ended{but}:\n{text}")

    def log_dir(self, node: str) -> Path:
        """The node's /var/log on the host, there also when the node is off."""
        return self.state / "nodes" / node / "upper/var/log"

    # --- commands in nodes --------------------------------------------------------------------------------

    def exec_argv(self, node: str, argv: Sequence[str], user: str | None = None) -> list[str]:
        """The host's command that runs argv in a node, as root or as one of its users, in that user's home."""
        enter = ["nsenter", "-t", str(self._need_pid(node)), "-m", "-u", "-i", "-n", "-p", "--"]
        home = "/root" if user in (None, "root") else f"{conf.HOMES}/{user}" if user in _USERS else "/"
        who = user or "root"
        env = [f"PATH={_NODE_PATH}", f"HOME={home}", f"USER={who}", f"LOGNAME={who}", "SHELL=/bin/bash"]
        env += ["LC_ALL=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}"]
        become = [] if who == "root" else _become(who, self._passwd(node, who))
        return [*enter, "env", "-i", "-C", home, *env, *become, *argv]

    def _passwd(self, node: str, user: str) -> tuple[int, int]:
        return self._account(self.root(node), user)

    def exec(
        self,
        node: str,
        argv: Sequence[str],
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float | None = None,
    ) -> proc.Result:
        """Run a command in a node to its end; ToolFailed when it fails and check is set."""
        done = proc.run(self.exec_argv(node, argv, user), stdin=stdin or "", timeout_s=timeout_s)
        return done.check() if check else done

    def leftovers(self, settle_s: float = 3.0) -> list[str]:
        """What should not be in any node while no job runs; see leftovers_of. Looks again until settle_s is over,
        since Slurm's and the agent's clean-up goes on for a moment after a job's end."""
        deadline = time.monotonic() + settle_s
        while True:
            found = [line for node in self.nodes() if self.pid(node) for line in leftovers_of(self, node)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    # --- helpers ------------------------------------------------------------------------------------------

    def _need_root(self) -> None:
        if os.geteuid() != 0:
            raise LabError(reason="needs root (namespaces, mounts, cgroups)")

    def _need_running(self) -> Running:
        running = self.running()
        if running is None:
            raise LabError(reason="is not up: scripts/lab up")
        return running

    def _need_pid(self, node: str) -> int:
        if node not in self.nodes():
            raise LabError(reason=f"no node {node}; there are: {' '.join(self.nodes()) or 'none, it is not up'}")
        pid = self.pid(node)
        if pid is None:
            raise LabError(reason=f"{node} is off: scripts/lab start {node}")
        return pid

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lab.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._say(f"{what}: {time.monotonic() - start:.1f} s")


def _become(user: str, ids: tuple[int, int]) -> list[str]:
    return ["setpriv", f"--reuid={ids[0]}", f"--regid={ids[1]}", "--init-groups", "--"]


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    except FileNotFoundError:
        return ""
