"""What jobs of one node must not share, on real links in a network namespace of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucr_hpc.capsule import network
from gpucr_hpc.config import NetworkConfig

_TWO = """
from pyroute2 import IPRoute
from gpucr_hpc.capsule import network
with IPRoute() as host:
    for job in ("1", "8193", "8194"):
        host.link("add", ifname=f"d{job}", kind="veth", peer=f"p{job}")
        (index,) = host.link_lookup(ifname=f"d{job}")
        host.link("set", index=index, state="up")
        print(network._take_slot(job, index, host)[1])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a network namespace)")
def test_jobs_whose_numbers_lie_far_apart_have_their_own_way_out() -> None:
    """The place of an address comes from the job's number; one that is taken is passed over."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _TWO], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["100.64.128.6", "100.64.128.10", "100.64.128.14"]


def test_tunnels_of_all_jobs_have_their_own_number() -> None:
    """VXLAN numbers have 24 bits; Slurm's job numbers stay below 2**26 and turn over, so only ids 2**24 apart meet."""
    config = NetworkConfig()
    numbers = {network.tunnel_id(config, str(job)) for job in (1, 2, 8193, 70000, (1 << 24) - 1)}
    assert len(numbers) == 5
    assert all(0 < n < 1 << 24 for n in numbers)
