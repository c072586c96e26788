"""The nodes of a running lab: what they are, their processes, switching them on and off, commands in them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab import conf, gpus, host
from gpucr_hpc.lab.boot import NodeFile, NodeSpec
from gpucr_hpc.lab.slurm import SlurmCommands
from gpucr_hpc.lab.wait import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
USERS = {"alice": 2001, "bob": 2002}
_READY_STATES = {"idle", "mixed", "allocated", "completing"}
_READY_LIMIT_S = 60.0
_LOG_TAIL_LINES = 15
_NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Running:
    """lab.json: what the last `up` started."""

    nodes: tuple[str, ...]
    settings: tuple[str, ...]
    rootfs: str
    layers: tuple[str, ...] = ()  # directories over it, the topmost first


def _gres(devices: Collection[str]) -> dict[str, NodeFile]:
    """gres.conf of a node with these devices."""
    return {"/etc/slurm/gres.conf": NodeFile(gpus.gres_conf(sorted(devices)).encode())} if devices else {}


class Nodes(SlurmCommands):
    """The nodes below one state directory; `say` gets lines for people."""

    def __init__(self, state: Path, say: Callable[[str], None]) -> None:
        self.state = state
        self._say = say

    def running(self) -> Running | None:
        """What lab.json says, or None when no lab is up."""
        try:
            table = json.loads((self.state / "lab.json").read_text())
        except FileNotFoundError:
            return None
        return Running(tuple(table["nodes"]), tuple(table["settings"]), table["rootfs"], tuple(table["layers"]))

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
        with_gpus = gpus.wanted(running.settings) and node != conf.CONTROLLER
        devices = gpus.devices() if with_gpus else {}
        spec = NodeSpec(
            name=node,
            role=conf.CONTROLLER if node == conf.CONTROLLER else "node",
            address=conf.address(node),
            prefix_length=conf.PREFIX_LENGTH,
            gateway=conf.BRIDGE_ADDRESS,
            bridge=host.BRIDGE,
            link=host.link_of(node),
            lower=":".join([*running.layers, running.rootfs]),
            work_dir=str(work),
            shared=str(self.state / "shared"),
            package=str(CHECKOUT / "gpucr_hpc"),
            plugin=str(self.state / "plugin"),
            pid_file=str(work / "pid"),
            cgroup_version=host.cgroup_version(),
            devices=devices,
            host_directories=list(gpus.HOST_DIRECTORIES) if with_gpus else [],
            links=gpus.links() if with_gpus else {},
            files=self._files(node, running) | _gres(devices),
        )
        env = proc.clean_env({"PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"})
        done = proc.run(
            [shutil.which("python3") or "python3", "-m", "gpucr_hpc.lab.boot"],
            stdin=spec.to_json(),
            env=env,
            cwd="/",
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

    def _kill(self, node: str) -> None:
        """Switch a node off, whatever state it is in; nothing of it is left on the host but its directory."""
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
        """Wait until the agents run and have their sockets; nothing to wait for when the checkout has none
        yet.
        """
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
            if _failed(self.root(node) / f"run/lab/{name}.exit"):
                logs = [self.log_dir(node) / f"{name}.{kind}" for kind in ("stderr", "log")]
                text = next((tail for tail in map(_tail, logs) if tail), "(it wrote nothing)")
                raise LabError(reason=f"{name} of {node} ended{but}:\n{text}")

    def need_own_checkout(self) -> None:
        """LabError when the nodes run the package of another checkout: its agents and our C parts would not fit."""
        for node in self.nodes():
            theirs = self.root(node) / "usr/lib/python3/dist-packages/gpucr_hpc"
            if not theirs.samefile(CHECKOUT / "gpucr_hpc"):
                raise LabError(reason="is up from another checkout; end it there, or `scripts/lab up --fresh` here")

    def log_dir(self, node: str) -> Path:
        """The node's /var/log on the host, there also when the node is off."""
        return self.state / "nodes" / node / "upper/var/log"

    # --- commands in nodes --------------------------------------------------------------------------------

    def exec_argv(self, node: str, argv: Sequence[str], user: str | None = None) -> list[str]:
        """The host's command that runs argv in a node, as root or as one of its users, in its home."""
        enter = ["nsenter", "-t", str(self._need_pid(node)), "-m", "-u", "-i", "-n", "-p", "--"]
        home = "/root" if user in (None, "root") else f"{conf.HOMES}/{user}" if user in USERS else "/"
        who = user or "root"
        env = [f"PATH={_NODE_PATH}", f"HOME={home}", f"USER={who}", f"LOGNAME={who}", "SHELL=/bin/bash"]
        env += ["LC_ALL=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}"]
        become = [] if who == "root" else _become(account(self.root(node), who))
        return [*enter, "env", "-i", "-C", home, *env, *become, *argv]

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


def account(system: Path, user: str) -> tuple[int, int]:
    for line in (system / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == user:
            return int(fields[2]), int(fields[3])
    raise LabError(reason=f"no user {user} in {system}")


def _become(ids: tuple[int, int]) -> list[str]:
    return ["setpriv", f"--reuid={ids[0]}", f"--regid={ids[1]}", "--init-groups", "--"]


def _failed(path: Path) -> bool:
    """Does an .exit file tell of a failure? Not when somebody stopped the daemon, whose init starts it again."""
    try:
        return int(path.read_text()) not in (0, -signal.SIGTERM, -signal.SIGKILL)
    except (FileNotFoundError, ValueError):
        return False


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    except FileNotFoundError:
        return ""
