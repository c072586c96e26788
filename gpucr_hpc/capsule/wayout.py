"""A job's way out of its own network: address translation in a namespace between the capsule and its node.

    capsule              way out                            node
    uplink (veth) ------ job (veth)   node (veth) --------- gpucrJOB (veth)
    any source           own address -> one of the node     -> the node's address

The jobs of a node may use the same virtual addresses, so each one's is translated before a packet comes to the node.
Not in the capsule: a namespace that translates looks up every packet's connection, and packets between the nodes of a
job, or over loopback, would pay for it (scripts/measure_network).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetNS
from pyroute2 import netns as namespaces
from pyroute2.netlink.exceptions import NetlinkError

from gpucr_hpc.proc import clean_env, run_async

NAMESPACES = Path("/run/netns")
PREFIX = "gpucrout-"
PERMANENT = 128  # NUD_PERMANENT, rtnetlink(7)
_LINK = 253  # RT_SCOPE_LINK, rtnetlink(7)
_NO_IPV6 = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}  # no link-local address
_ADDRESSES = ipaddress.ip_network("100.64.128.0/17")  # shared address space (RFC 6598), /30 for each job of a node
_SLOTS = 8192

_TRANSLATE = """
table ip gpucr_nat {{
  chain post {{ type nat hook postrouting priority srcnat; oifname "node" snat to {address}; }}
}}
"""
_NODE_TRANSLATES = f"""
add table ip gpucr_host
add chain ip gpucr_host post {{ type nat hook postrouting priority srcnat; }}
flush chain ip gpucr_host post
add rule ip gpucr_host post ip saddr {_ADDRESSES} masquerade
"""
_NODE_DOES_NOT = """
add table ip gpucr_host
delete table ip gpucr_host
"""

_settling = asyncio.Lock()


async def settle_node() -> None:
    """The node translates while a job has a way out, and no longer: meanwhile the kernel tracks every connection of the
    node, other jobs' too, which costs each of their packets. Raises ToolFailed."""
    async with _settling:
        wanted = any(NAMESPACES.glob(PREFIX + "*"))
        rules = _NODE_TRANSLATES if wanted else _NODE_DOES_NOT
        (await run_async(["nft", "-f", "-"], stdin=rules, timeout_s=20, env=clean_env())).check()
        if wanted:
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def configure(job: str, capsule: str, own: str, node: Any, inside: Any) -> str:
    """Lead the packets of a capsule, whose address is `own`, to the node; returns its address as the node sees it.

    capsule: name of its namespace. node, inside: netlink sockets. `translate` comes next. Blocks; raises NetlinkError,
    OSError.

    The ends in capsule and node have no address, so that no library takes them for a network (UCX lists every interface
    that has one, in this job and in any other job of the node); routes and neighbours are fixed instead.
    """
    namespaces.create(PREFIX + job)
    node.link("add", ifname=_link(job), kind="veth", peer={"ifname": "node", "net_ns_fd": PREFIX + job})
    with NetNS(PREFIX + job) as between:
        between.link("add", ifname="job", kind="veth", peer={"ifname": "uplink", "net_ns_fd": capsule})
        outside, to_node, to_job, uplink = (
            _up(netlink, name)
            for netlink, name in ((node, _link(job)), (between, "node"), (between, "job"), (inside, "uplink"))
        )
        gateway, seen_as = _take_slot(job, outside, node)
        _lead(inside, uplink, gateway, _mac(between, to_job))
        inside.route("add", dst="default", gateway=gateway, oif=uplink, prefsrc=own)
        _lead(between, to_job, own, _mac(inside, uplink))
        between.addr("add", index=to_node, address=seen_as, prefixlen=32)
        _lead(between, to_node, gateway, _mac(node, outside))
        between.route("add", dst="default", gateway=gateway, oif=to_node)
        node.neigh("replace", dst=seen_as, lladdr=_mac(between, to_node), ifindex=outside, state=PERMANENT)
        return seen_as


async def translate(job: str, seen_as: str) -> None:
    """Open the way out: packets are let through and get the address that `configure` gave. Raises ToolFailed."""
    await settle_node()
    # /proc/sys/net shows the namespace of who opens it.
    script = "echo 1 > /proc/sys/net/ipv4/ip_forward && exec nft -f -"
    argv = ["nsenter", f"--net={NAMESPACES / (PREFIX + job)}", "sh", "-c", script]
    (await run_async(argv, stdin=_TRANSLATE.format(address=seen_as), timeout_s=20, env=clean_env())).check()


def _up(netlink: Any, name: str) -> int:
    """Switch an interface on, without an IPv6 address; its index."""
    (index,) = netlink.link_lookup(ifname=name)
    netlink.link("set", index=index, state="up", IFLA_AF_SPEC=_NO_IPV6)
    return int(index)


def _mac(netlink: Any, index: int) -> str:
    return str(netlink.get_links(index)[0].get_attr("IFLA_ADDRESS"))


def _lead(netlink: Any, index: int, address: str, mac: str) -> None:
    """An address is reached through an interface, by a fixed MAC address."""
    netlink.neigh("replace", dst=address, lladdr=mac, ifindex=index, state=PERMANENT)
    netlink.route("add", dst=f"{address}/32", oif=index, scope=_LINK)


def _take_slot(job: str, outside: int, node: Any) -> tuple[str, str]:
    """Next hop of a job's way out, which no interface has, and the job's address as the node sees it, with the node's
    route to it. The kernel refuses a second route to an address: so jobs whose numbers lie 8192 apart do not meet."""
    for probe in range(_SLOTS):
        slot = (int(job) + probe) % _SLOTS
        gateway, seen_as = str(_ADDRESSES[slot * 4 + 1]), str(_ADDRESSES[slot * 4 + 2])
        try:
            node.route("add", dst=f"{seen_as}/32", oif=outside, scope=_LINK)
        except NetlinkError as error:
            if error.code != errno.EEXIST:
                raise
            continue
        return gateway, seen_as
    raise OSError(errno.EADDRINUSE, f"all {_SLOTS} addresses of {_ADDRESSES} are taken")


def _link(job: str) -> str:
    return f"gpucr{job}"[:15]


def remove(job: str) -> bool:
    """Remove the way out with its links; False for one that is gone. `settle_node` comes next."""
    there = (NAMESPACES / (PREFIX + job)).exists()
    with IPRoute() as node:  # the pair goes with the namespace, but not at once
        for index in node.link_lookup(ifname=_link(job)):
            with contextlib.suppress(NetlinkError):
                node.link("del", index=index)
    remove_namespace(PREFIX + job)
    return there


def remove_namespace(name: str) -> None:
    """Remove a named namespace; one that is gone is no error."""
    try:
        namespaces.remove(name)
    except OSError:
        if (NAMESPACES / name).exists():
            raise
