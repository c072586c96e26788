"""Boxes: alone inside, and nothing left of them, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr_hpc.lab import host
from gpucr_hpc.lab.nodes import CHECKOUT
from gpucr_hpc.lab.wait import wait_until

BOX = [sys.executable, "-m", "gpucr_hpc.lab.box"]
# A daemon, on version 1 a frozen process, a mount, a lab's directory.
BUSY = """
setsid sleep 600 &
if mkdir /sys/fs/cgroup/freezer/x 2>/dev/null; then
    sleep 600 &
    echo $! >/sys/fs/cgroup/freezer/x/cgroup.procs
    echo FROZEN >/sys/fs/cgroup/freezer/x/freezer.state
fi
mount -t tmpfs tmpfs /mnt
mkdir -p "$GPUCR_LAB/nodes"
echo ready
read -r _
exit 3
"""


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Boxes are in tmp_path; nothing of them is there at the end, nor a cgroup or a process of them."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    yield {**os.environ, "PYTHONPATH": str(CHECKOUT), "GPUCR_LAB": str(tmp_path / "lab")}
    assert left(tmp_path) == []


def left(place: Path) -> list[str]:
    """Directories of boxes, their cgroups, and processes that were started for them."""
    marked = f"GPUCR_LAB={place}/lab".encode()
    found = [str(path) for path in place.glob("lab.box-*")]
    for directory, names, _ in os.walk(host.CGROUPS):
        found += [f"{directory}/{name}" for name in names if name.startswith("lab.box-")]
    for pid in host.all_tasks():
        try:
            if marked in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(f"process {pid}")
        except OSError:
            continue
    return found


def busy(env: dict[str, str]) -> subprocess.Popen[str]:
    box = subprocess.Popen([*BOX, "sh", "-c", BUSY], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert box.stdout is not None
    assert box.stdout.readline() == "ready\n"
    return box


def janitor(front: int) -> int:
    """The one that is not PID 1 of a namespace."""
    tasks = host.all_tasks()
    own = tasks[front].pid_namespace
    (pid,) = (task.pid for task in tasks.values() if task.parent == front and task.pid_namespace == own)
    return pid


def test_alone(env):
    """Own processes, own network, own lab, own root of the cgroups; the exit status comes out."""
    script = 'echo "$(ps -e -o pid= | wc -w) $(ls /sys/class/net) $GPUCR_LAB"; cat /proc/self/cgroup; exit 7'
    done = subprocess.run([*BOX, "sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    first, *cgroups = done.stdout.splitlines()
    count, links, lab = first.split()
    assert (done.returncode, done.stderr, links) == (7, "", "lo")
    assert int(count) < 8
    assert lab.startswith(f"{env['GPUCR_LAB']}.box-")
    assert {line.split(":")[2] for line in cgroups} <= {"/", "/box.scope"}


@pytest.mark.parametrize(("argv", "status"), [(["sh", "-c", "kill -9 $$"], 137), (["/nowhere/x"], 127)])
def test_exit_status(env, argv, status):
    assert status == subprocess.run([*BOX, *argv], env=env, stderr=subprocess.DEVNULL, check=False).returncode


def test_the_commands_end_ends_all(env, tmp_path):
    """When the box has returned, its daemons, frozen ones too, have ended and its directories are gone."""
    box = busy(env)
    box.communicate("go on\n", timeout=60)
    assert (box.returncode, left(tmp_path)) == (3, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed(env, tmp_path, number):
    """Who waits for the box is killed: the janitor removes it."""
    with busy(env) as box:
        box.send_signal(number)
    assert -number == box.returncode
    wait_until(lambda: not left(tmp_path), 30, "the end of the box")


def test_killed_with_its_janitor(env, tmp_path):
    """Nobody is left to remove it: the next box does."""
    with busy(env) as box:
        os.kill(janitor(box.pid), signal.SIGKILL)
        box.kill()
    assert left(tmp_path) != []
    subprocess.run([*BOX, "true"], env=env, check=True)
    assert left(tmp_path) == []


def test_box_in_a_box(env):
    inner = [*BOX, *BOX, "sh", "-c", 'echo "$GPUCR_LAB"; exit 5']
    done = subprocess.run(inner, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count(".box-")) == (5, "", 2)
