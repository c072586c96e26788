"""The job's network on one node: a namespace with a stable virtual address, and a lock.

The address depends on the node rank alone, so that sockets can be bound again after a move. The nodes of a job are
joined by a VXLAN of its own with fixed neighbours: no multicast, no learning, nothing that another job could hear.
Packets to the site leave by a namespace of their own (`capsule.wayout`), so nothing looks at those between the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetNS
from pyroute2 import netns as namespaces
from pyroute2.netlink.exceptions import NetlinkError

from gpucr_hpc.capsule import wayout
from gpucr_hpc.capsule.wayout import NAMESPACES, PERMANENT, remove_namespace
from gpucr_hpc.config import NetworkConfig
from gpucr_hpc.errors import CapsuleError, GpucrError
from gpucr_hpc.log import Log
from gpucr_hpc.proc import clean_env, run_async

log = Log(__name__)

INTERFACE = "job0"
_PREFIX = "gpucr-"
_TUNNEL_BYTES = 50  # outer Ethernet, IPv4, UDP and VXLAN headers (RFC 7348)
_CRIU_MARK = 0xC114  # CRIU's own repair packets carry it (criu/netfilter.c)

_LOCK = f"""
table inet gpucr_lock {{
  chain input {{ type filter hook input priority -400; policy drop; meta mark {_CRIU_MARK:#x} accept; }}
  chain output {{ type filter hook output priority -400; policy drop; meta mark {_CRIU_MARK:#x} accept; }}
}}
"""

#: A shell's script: TCP in this namespace uses the first congestion control of its arguments that the kernel lets it.
CHOOSE_CONGESTION_CONTROL = (
    'for name; do echo "$name" > /proc/sys/net/ipv4/tcp_congestion_control && exit 0; done; exit 1'
)


@dataclass(frozen=True)
class Geometry:
    """A job's nodes, by node rank. names: as the job knows them, from its first run on. nodes: as Slurm names
    them in this run. addresses: IPv4 of these nodes."""

    names: tuple[str, ...]
    nodes: tuple[str, ...]
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.nodes) == len(self.addresses):
            raise ValueError("names, nodes and addresses must be of one length")

    @property
    def others(self) -> list[tuple[str, str]]:
        """Node and address of every node but the first."""
        return list(zip(self.nodes, self.addresses, strict=True))[1:]

    def virtual(self, node: str) -> str:
        """The job's name for a node of this run; other names stay."""
        return self.names[self.nodes.index(node)] if node in self.nodes else node

    def physical(self, name: str) -> str:
        """The node of this run that the job knows by a name; other names stay."""
        return self.nodes[self.names.index(name)] if name in self.names else name


def namespace_name(job: str) -> str:
    return _PREFIX + job


def namespace_path(job: str) -> Path:
    return NAMESPACES / namespace_name(job)


def address(config: NetworkConfig, node_rank: int) -> str:
    """Virtual address of a node rank."""
    return str(ipaddress.ip_network(config.subnet)[node_rank + 1])


def hosts_text(config: NetworkConfig, geometry: Geometry) -> str:
    """/etc/hosts of a capsule: the job's names for its nodes."""
    lines = [f"{address(config, rank)} {name}" for rank, name in enumerate(geometry.names)]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", *lines, ""])


def _mac(node_rank: int) -> str:
    """A fixed, locally administered address."""
    return "02:67:70:" + ":".join(f"{node_rank >> shift & 255:02x}" for shift in (16, 8, 0))


async def _nft(rules: str, job: str) -> None:
    argv = ["nsenter", f"--net={namespace_path(job)}", "nft", "-f", "-"]
    (await run_async(argv, stdin=rules, timeout_s=20, env=clean_env())).check()


async def _choose_congestion_control(job: str, names: Sequence[str]) -> None:
    argv = ["nsenter", f"--net={namespace_path(job)}", "sh", "-c", CHOOSE_CONGESTION_CONTROL, "sh", *names]
    done = await run_async(argv, timeout_s=20, env=clean_env())
    if done.status:
        log.warning("jobs' TCP is as the node's", job=job, wanted=" ".join(names), error=done.stderr.strip())


async def settle_host() -> None:
    """Once per start of the agent: the node's side is as the capsules that exist need it, and not as others left it."""
    await wayout.settle_node()


async def create(job: str, node_rank: int, geometry: Geometry, config: NetworkConfig, *, locked: bool) -> None:
    """Make the namespace of a job; a left-over of the same name is removed first.

    With locked no packet passes before `unlock`. Raises CapsuleError.
    """
    await remove(job)
    try:
        await asyncio.to_thread(namespaces.create, namespace_name(job))
        if locked:
            await lock(job)
        seen_as = await asyncio.to_thread(_configure, job, node_rank, geometry, config)
        if config.congestion_control and len(geometry.nodes) > 1:
            await _choose_congestion_control(job, config.congestion_control)
        if seen_as:
            await wayout.translate(job, seen_as)
    except (GpucrError, NetlinkError, OSError) as error:
        await remove(job)
        raise CapsuleError(job=job, node=geometry.nodes[node_rank], reason=f"no network: {error}") from None


@contextmanager
def _netlink(job: str) -> Iterator[tuple[Any, Any]]:
    """Netlink sockets of the host and of a job's namespace."""
    with IPRoute() as host, NetNS(namespace_name(job)) as inside:
        yield host, inside


def _configure(job: str, node_rank: int, geometry: Geometry, config: NetworkConfig) -> str:
    """Everything but the rules; the capsule's address as the node sees it, empty without a way out."""
    network = ipaddress.ip_network(config.subnet)
    own = address(config, node_rank)
    with _netlink(job) as (host, inside):
        inside.link("set", index=1, state="up")
        if len(geometry.nodes) > 1:
            index = _add_tunnel(job, node_rank, geometry, config, host, inside)
            inside.addr("add", index=index, address=own, prefixlen=network.prefixlen)
            inside.link("set", index=index, state="up")
            for rank, node_address in enumerate(geometry.addresses):
                if rank != node_rank:
                    peer = address(config, rank)
                    inside.neigh("replace", dst=peer, lladdr=_mac(rank), ifindex=index, state=PERMANENT)
                    inside.fdb("append", ifindex=index, lladdr=_mac(rank), dst=node_address)
        else:
            inside.addr("add", index=1, address=own, prefixlen=32)
        return wayout.configure(job, namespace_name(job), own, host, inside) if config.nat else ""


def tunnel_id(config: NetworkConfig, job: str) -> int:
    """Number of a job's VXLAN; jobs whose ids lie 2**24 apart would share one."""
    return (config.vni_base + int(job)) % (1 << 24)


def _add_tunnel(job: str, node_rank: int, geometry: Geometry, config: NetworkConfig, host: Any, inside: Any) -> int:
    """Make the VXLAN device on the host, whose socket then stays there, and move it into the namespace."""
    name = f"gpucrx{job}"[:15]
    local = geometry.addresses[node_rank]
    host.link(
        "add",
        ifname=name,
        kind="vxlan",
        vxlan_id=tunnel_id(config, job),
        vxlan_port=config.vxlan_port,
        vxlan_local=local,
        vxlan_learning=0,
        vxlan_udp_csum=0,  # what is inside has checksums of its own, and some NICs segment no tunnel with a second one
    )
    (index,) = host.link_lookup(ifname=name)
    try:
        mtu = config.mtu or _mtu_towards(host, local) - _TUNNEL_BYTES
        host.link("set", index=index, address=_mac(node_rank), mtu=mtu)
        host.link("set", index=index, net_ns_fd=namespace_name(job))
    except BaseException:
        host.link("del", index=index)
        raise
    (index,) = inside.link_lookup(ifname=name)
    inside.link("set", index=index, ifname=INTERFACE)
    return int(index)


def _mtu_towards(host: Any, local: str) -> int:
    """MTU of the node's interface that has an address."""
    for found in host.get_addr(address=local):
        (link,) = host.get_links(found["index"])
        return int(link.get_attr("IFLA_MTU"))
    return 1500


async def lock(job: str) -> None:
    """Let no packet in or out but CRIU's own: while one side of a connection is frozen or missing, a packet
    would be answered with a reset or acknowledged by a socket whose state is already written."""
    await _nft(_LOCK, job)


async def unlock(job: str) -> None:
    """Open the network again; an open one stays open."""
    await _nft("table inet gpucr_lock\ndelete table inet gpucr_lock\n", job)


async def remove(job: str) -> None:
    """Remove the namespaces with their devices; one that is gone is no error. Raises CapsuleError."""
    try:
        if await asyncio.to_thread(_remove, job):
            await wayout.settle_node()
    except (NetlinkError, OSError) as error:
        raise CapsuleError(job=job, node="this node", reason=f"its network is not removed: {error}") from None


def _remove(job: str) -> bool:
    """False for a job that had no way out."""
    if namespace_path(job).exists():
        with contextlib.suppress(NetlinkError, OSError), NetNS(namespace_name(job)) as inside:
            # The namespace is taken apart some time after its end; the tunnel's number must be free at once.
            for index in inside.link_lookup(ifname=INTERFACE):
                inside.link("del", index=index)
        remove_namespace(namespace_name(job))
    return wayout.remove(job)


def existing() -> set[str]:
    """Job ids that have a namespace on this node, be it the way out alone."""
    names = [path.name for path in NAMESPACES.glob("*")]
    prefixes = (_PREFIX, wayout.PREFIX)
    return {name.removeprefix(p) for name in names for p in prefixes if name.startswith(p)}


def resolver_file(candidates: Sequence[str] = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")) -> str | None:
    """A resolv.conf whose name servers a capsule can reach: not those on the node's own loopback."""
    for path in candidates:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        servers = [line.split()[1] for line in lines if line.startswith("nameserver") and len(line.split()) > 1]
        if any(not ipaddress.ip_address(s.partition("%")[0]).is_loopback for s in servers):
            return path
    return None
