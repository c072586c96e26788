"""gpucr doctor on a node of a cluster: what is well, and what is not, each found by looking."""

from __future__ import annotations

import json
from typing import Any

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import STORE


def bad(lab: Lab, node: str) -> dict[str, dict[str, Any]]:
    """Findings that are bad, by what was looked at; the exit code says whether there are any."""
    done = lab.exec(node, ["gpucr", "doctor", "--json"], check=False, timeout_s=60)
    report = json.loads(done.stdout)
    assert (done.status == 0) == report["good"]
    areas = {"CRIU", "control groups", "memory", "pipes", "chunks", "disk", "network", "plugin", "key", "agents"}
    areas |= {"store", "Slurm"}
    assert areas <= {finding["what"] for finding in report["findings"]}
    # How much a grace time covers depends on this machine's memory and disk.
    rest = [f for f in report["findings"] if not f["good"] and not f["detail"].startswith("partition ")]
    assert all("   # otherwise " in f["advice"] for f in rest)
    return {finding["what"]: finding for finding in rest}


def test_what_is_wrong_is_found(lab: Lab) -> None:
    """Nothing at first; then no plugin, a store that its account may not write, a program that is missing."""
    assert bad(lab, "n1") == {}
    stack = lab.root("n1") / "etc/slurm/plugstack.conf"
    before = stack.read_text()
    mode = lab.exec("n1", ["stat", "-c", "%a", STORE]).stdout.strip()
    lab.exec("n1", ["chmod", "500", STORE])
    try:
        stack.write_text("# " + before)
        found = bad(lab, "n1")
        assert set(found) == {"plugin", "store"}
        assert "has no line with gpucr.so" in found["plugin"]["detail"]
        assert "Permission denied" in found["store"]["detail"]
    finally:
        stack.write_text(before)
        lab.exec("n1", ["chmod", mode, STORE])
    lab.exec("n1", ["sh", "-c", "mv /usr/sbin/nft /usr/sbin/nft.away"])
    try:
        found = bad(lab, "n1")
        assert set(found) == {"program", "network"}
        assert "apt-get install nftables" in found["program"]["advice"]
    finally:
        lab.exec("n1", ["sh", "-c", "mv /usr/sbin/nft.away /usr/sbin/nft"])


def test_as_a_user(lab: Lab) -> None:
    """He is told to ask as root, and sees no more than that."""
    done = lab.exec("n1", ["gpucr", "doctor"], user="alice", check=False, timeout_s=60)
    assert done.status == 10
    assert "FAIL  root: uid " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
