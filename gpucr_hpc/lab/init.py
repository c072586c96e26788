"""PID 1 of a lab node: starts its daemons, reaps, restarts slurmd and agent as systemd would. Standard library only.

Runs inside the node as `python3 -m gpucr_hpc.lab.init ROLE ADDRESS/PREFIX GATEWAY`. Each daemon's pid is in
/run/lab/NAME.pid while it runs, and its end in /run/lab/NAME.exit; the host reads them through
/proc/PID/root. Logs are in /var/log/NAME.log; slurmctld and slurmd write theirs themselves, what they say on
stderr goes to NAME.stderr. A daemon is started when what it needs is there, not after a time.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

RUN = Path("/run/lab")
FAULTS = RUN / "faults"
FAKE_DRIVER = RUN / "fake-driver"
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
_PACKAGE = Path("/usr/lib/python3/dist-packages/gpucr_hpc")
_RESTART_DELAY_S = 0.5
_LONGEST_RESTART_DELAY_S = 5.0
_STEADY_S = 5.0  # a daemon that ran as long did start
_SLURMCTLD_PORT = 6817


@dataclass
class Daemon:
    """One program of the node. ready: may it be started? restart: again after its end, as Restart=always
    does.
    """

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], bool]
    output: str
    user: str = "root"
    restart: bool = False
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    delay_s: float = _RESTART_DELAY_S
    over: bool = field(default=False)

    def start(self) -> None:
        owner = pwd.getpwnam(self.user)
        (RUN / f"{self.name}.exit").unlink(missing_ok=True)
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                start_new_session=True,
                user=owner.pw_uid,
                group=owner.pw_gid,
                extra_groups=[],
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []) and None,
            )
        self.started_at = time.monotonic()
        (RUN / f"{self.name}.pid").write_text(f"{self.process.pid}\n")

    def ended(self, status: int) -> None:
        assert self.process is not None
        self.process.returncode = status  # init reaps for all: Popen must not look for it
        self.process = None
        (RUN / f"{self.name}.pid").unlink(missing_ok=True)
        (RUN / f"{self.name}.exit").write_text(f"{status}\n")
        # systemd gives up on a service that dies at once each time; here it comes more and more slowly, since
        # a checkout that does not start may be repaired at any moment.
        now = time.monotonic()
        steady = now - self.started_at > _STEADY_S
        self.due_at = now + (_RESTART_DELAY_S if steady else self.delay_s)
        self.delay_s = _RESTART_DELAY_S if steady else min(self.delay_s * 2, _LONGEST_RESTART_DELAY_S)
        self.over = not self.restart


def _munge_answers() -> bool:
    return MUNGE_SOCKET.exists()


def _controller_answers() -> bool:
    """slurmd that starts before slurmctld waits a second and more between its tries."""
    if not _munge_answers():
        return False
    try:
        socket.create_connection(("ctl", _SLURMCTLD_PORT), timeout=1).close()
    except OSError:
        return False
    return True


def _agent_can_start() -> bool:
    """The agent of a checkout that has none yet is waited for."""
    return _munge_answers() and ((_PACKAGE / "agent/__main__.py").exists() or (_PACKAGE / "agent.py").exists())


def daemons_of(role: str) -> list[Daemon]:
    """The daemons of a node: role is `ctl` or `node`."""
    munged = Daemon("munged", ("/usr/sbin/munged", "--foreground"), lambda: True, "/var/log/munged.log", user="munge")
    if role == "ctl":
        ctld = ("/usr/sbin/slurmctld", "-D")
        return [munged, Daemon("slurmctld", ctld, _munge_answers, "/var/log/slurmctld.stderr")]
    # Tests write files there and so choose fault points of the agent, or make that directory of a fake GPU driver.
    variables = (f"GPUCR_FAULTS={FAULTS}", f"GPUCR_FAKE_CUDA={FAKE_DRIVER}")
    agent = ("/usr/bin/env", *variables, "/usr/bin/python3", "-m", "gpucr_hpc.agent")
    return [
        munged,
        Daemon("slurmd", ("/usr/sbin/slurmd", "-D"), _controller_answers, "/var/log/slurmd.stderr", restart=True),
        Daemon("agent", agent, _agent_can_start, "/var/log/agent.log", restart=True),
    ]


def _prepare(address: str, gateway: str) -> None:
    batch = f"link set lo up\naddr add {address} dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
    subprocess.run(["ip", "-batch", "-"], input=batch.encode(), check=True)
    RUN.mkdir()
    FAULTS.mkdir()
    for name, user in (
        ("/run/munge", "munge"),
        ("/var/lib/munge", "munge"),
        ("/run/slurm", "slurm"),
        ("/var/spool/slurmctld", "slurm"),
        ("/var/spool/slurmd", "root"),
    ):
        owner = pwd.getpwnam(user)
        os.makedirs(name, mode=0o755, exist_ok=True)
        os.chown(name, owner.pw_uid, owner.pw_gid)
    log = os.open("/var/log/slurmctld.log", os.O_CREAT | os.O_WRONLY, 0o644)
    os.fchown(log, pwd.getpwnam("slurm").pw_uid, -1)
    os.close(log)
    own_cgroup = Path("/sys/fs/cgroup/init.scope")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        # Version 2: a cgroup with processes in it cannot give controllers to its children.
        own_cgroup.mkdir(exist_ok=True)
        (own_cgroup / "cgroup.procs").write_text("0")


def _reap(daemons: list[Daemon]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for daemon in daemons:
            if daemon.process is not None and daemon.process.pid == pid:
                code = os.waitstatus_to_exitcode(status)
                print(f"{daemon.name} ended with {code}", flush=True)
                daemon.ended(code)


def main() -> None:
    """Run the node until it is killed; SIGTERM ends it, and the kernel then everything in it."""
    role, address, gateway = sys.argv[1:4]
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # `nohup scripts/lab up` is not the node's affair
        signal.signal(number, signal.SIG_DFL)
    _prepare(address, gateway)
    daemons = daemons_of(role)
    while True:
        _reap(daemons)
        now = time.monotonic()
        waiting = [daemon for daemon in daemons if daemon.process is None and not daemon.over]
        for daemon in waiting:
            if now >= daemon.due_at and daemon.ready():
                daemon.start()
                print(f"{daemon.name} started", flush=True)
        got = signal.sigtimedwait(signals, 0.05 if waiting else 60)
        if got is not None and got.si_signo == signal.SIGTERM:
            return


if __name__ == "__main__":
    main()
