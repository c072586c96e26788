"""What jobs of one node must not share, on real links in a network namespace of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr_hpc.capsule import network
from gpucr_hpc.config import NetworkConfig

_TWO = """
from pyroute2 import IPRoute
from gpucr_hpc.capsule import wayout
with IPRoute() as host:
    for job in ("1", "8193", "8194"):
        host.link("add", ifname=f"d{job}", kind="veth", peer=f"p{job}")
        (index,) = host.link_lookup(ifname=f"d{job}")
        host.link("set", index=index, state="up")
        print(wayout._take_slot(job, index, host)[1])
"""
_TUNNEL = """
import asyncio, json, subprocess, sys
from pyroute2 import IPRoute, NetNS
from gpucr_hpc.capsule import network
from gpucr_hpc.config import NetworkConfig
with IPRoute() as host:
    host.link("add", ifname="nic", kind="veth", peer="switch")
    (index,) = host.link_lookup(ifname="nic")
    host.link("set", index=index, state="up", mtu=9000)
    host.addr("add", index=index, address="192.0.2.2", prefixlen=24)
    geometry = network.Geometry(("a", "b"), ("x", "y"), ("192.0.2.1", "192.0.2.2"))
    config = NetworkConfig(nat=False, congestion_control=tuple(sys.argv[1:]))
    asyncio.run(network.create("5", 1, geometry, config, locked=False))
show = ["nsenter", f"--net={network.namespace_path('5')}", "cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
control = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
with NetNS(network.namespace_path("5").name) as inside:
    (link,) = inside.get_links(ifname="job0")
    data = link.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_DATA")
    print(json.dumps({
        "control": control,
        "mtu": link.get_attr("IFLA_MTU"),
        "address": [a.get_attr("IFA_ADDRESS") for a in inside.get_addr(index=link["index"], family=2)],
        **{n: data.get_attr("IFLA_VXLAN_" + n.upper()) for n in ("id", "port", "local", "learning", "udp_csum")},
    }))
asyncio.run(network.remove("5"))
"""
_OWN_NAMESPACES = ["unshare", "--net", "--mount", "sh", "-c"]
_OWN_NAMESPACES += ['mount -t tmpfs tmpfs /run && mkdir /run/netns && exec "$@"', "sh"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (network namespaces)")
@pytest.mark.parametrize("wanted", [["no such one", "reno"], [], ["no such one"]])
def test_tunnel_between_nodes(wanted: list[str]) -> None:
    """Its MTU is the one of the interface with the node's address, less the headers; it learns nothing; no checksum is
    put round packets that have their own (RFC 7348, section 5). TCP uses the first congestion control that the
    kernel has, else the node's."""
    nodes = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    argv = [*_OWN_NAMESPACES, sys.executable, "-c", _TUNNEL, *wanted]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "mtu": 8950,
        "control": "reno" if "reno" in wanted else nodes,
        "address": ["10.200.0.2"],
        "id": 0x470005,
        "port": 8474,
        "local": "192.0.2.2",
        "learning": 0,
        "udp_csum": 0,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (network namespaces)")
def test_only_what_leaves_a_job_is_tracked() -> None:
    """Jobs with one address reach the node as two; no connection inside a job is tracked; nothing is left.

    The node translates while there is a job, no longer: then it tracks no connection either."""
    program = Path(__file__).with_name("two_jobs.py")
    command = [*_OWN_NAMESPACES, sys.executable, "-c", program.read_text()]  # `-c`: it finds the package as we do
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for job, address in (("5", "100.64.128.22"), ("6", "100.64.128.26")):
        assert found[job]["seen_in_node"] == address
        assert found[job]["seen_in_job"] == "10.200.0.1"
        assert found[job]["tracked_in_job"] == 0
        assert found[job]["tracked_on_the_way"] > 0
    assert found["translating"] == [False, True, True, False]
    assert found["existing"] == ["5", "6"]
    assert found["half_gone"] == ["6"]
    assert (found["links"], found["namespaces"]) == (["lo"], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a network namespace)")
def test_jobs_whose_numbers_lie_far_apart_have_their_own_way_out() -> None:
    """The place of an address comes from the job's number; one that is taken is passed over."""
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", _TWO], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["100.64.128.6", "100.64.128.10", "100.64.128.14"]


def test_tunnels_of_all_jobs_have_their_own_number() -> None:
    """VXLAN numbers have 24 bits; Slurm's job numbers stay below 2**26 and turn over, so only ids 2**24 apart meet."""
    config = NetworkConfig()
    numbers = {network.tunnel_id(config, str(job)) for job in (1, 2, 8193, 70000, (1 << 24) - 1)}
    assert len(numbers) == 5
    assert all(0 < n < 1 << 24 for n in numbers)
