"""gpucr doctor --nodes: real SSH servers, one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

SERVER = """
set -e
getent passwd sshd >/dev/null || useradd --system --no-create-home --home-dir /run/sshd sshd
mkdir -p /run/sshd /root/.ssh
[ -e /etc/ssh/lab_key ] || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/lab_key
cat > /root/.ssh/authorized_keys
chmod 700 /root/.ssh
chmod 600 /root/.ssh/authorized_keys
/usr/sbin/sshd -f /dev/null -h /etc/ssh/lab_key -o PidFile=/run/sshd/lab.pid -o UsePAM=no -o StrictModes=no
cat /etc/ssh/lab_key.pub
"""
CLIENT = """
set -e
mkdir -p /root/.ssh
chmod 700 /root/.ssh
[ -e /root/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cat /root/.ssh/id_ed25519.pub
"""


@contextmanager
def servers(lab: Lab, client: str, nodes: list[str]) -> Iterator[None]:
    """SSH servers on these nodes for root of `client`, who knows their keys."""
    identity = lab.exec(client, ["sh", "-c", CLIENT]).stdout
    known = lab.root(client) / "root/.ssh/known_hosts"
    try:
        lines = []
        for node in nodes:
            key = lab.exec(node, ["sh", "-c", SERVER], stdin=identity).stdout
            lines.append(f"{node} {' '.join(key.split()[:2])}\n")
        known.write_text("".join(lines))
        yield
    finally:
        known.unlink(missing_ok=True)
        for node in nodes:
            pid = lab.root(node) / "run/sshd/lab.pid"
            if pid.exists():
                lab.exec(node, ["kill", pid.read_text().strip()])
                wait_until(lambda pid=pid: not pid.exists(), 10, f"the end of sshd on {node}")


@pytest.fixture
def ssh_lab(lab: Lab) -> Lab:
    running = lab.running()
    if running is None or not any("/layer-ssh-" in path for path in running.layers):
        pytest.skip("the lab that is up has no SSH: scripts/lab up --fresh --layer ssh")
    return lab


def test_one_table_of_many_nodes(ssh_lab: Lab) -> None:
    """Findings of each node, equal ones together; a node without a server and one with a foreign key are named."""
    with servers(ssh_lab, "n1", ["n2", "n3"]):
        done = ssh_lab.exec("n1", ["gpucr", "doctor", "--nodes", "n[2-4]", "--json"], check=False, timeout_s=120)
        report = json.loads(done.stdout)
        assert (done.status, report["good"], sorted(report["nodes"])) == (10, False, ["n2", "n3", "n4"])
        for node in ("n2", "n3"):
            own = json.loads(ssh_lab.exec(node, ["gpucr", "doctor", "--json"], check=False, timeout_s=60).stdout)
            assert [f["what"] for f in own["findings"]] == [f["what"] for f in report["nodes"][node]]
            assert any(f["what"] == "agent" and f["detail"].startswith(f"on {node},") for f in report["nodes"][node])
        (lost,) = report["nodes"]["n4"]
        assert (lost["what"], lost["good"]) == ("node", False)
        known = ssh_lab.root("n1") / "root/.ssh/known_hosts"
        kept = [line for line in known.read_text().splitlines(keepends=True) if not line.startswith("n3 ")]
        known.write_text("".join(kept))
        table = ssh_lab.exec("n1", ["gpucr", "doctor", "--nodes", "n2,n3"], check=False, timeout_s=120)
        lines = table.stdout.splitlines()
        assert lines[0].split() == ["NODES", "STATE", "WHAT", "DETAIL", "ADVICE"]
        assert [line for line in lines if line.startswith("n3 ") and "known_hosts" in line] != []
        assert not any(line.startswith("n[2-3]") for line in lines)


def test_user_needs_nodes(lab: Lab) -> None:
    """An account to log in as means nothing on this node."""
    done = lab.exec("n1", ["gpucr", "doctor", "--user", "root"], check=False)
    assert (done.status, "--user needs --nodes" in done.stderr) == (2, True)
