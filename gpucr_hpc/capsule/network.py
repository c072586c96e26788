"""The job's network on one node: a namespace with a stable virtual address, a lock, and a way out by NAT.

The address depends on the node rank alone, so that sockets can be bound again after a move. Packets to the site
leave through a veth pair with an address of this node's own; the capsule's address is rewritten inside the
namespace and the node's outside, so many jobs can use the same virtual addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from gpucr_hpc.config import NetworkConfig
from gpucr_hpc.errors import CapsuleError, GpucrError
from gpucr_hpc.proc import clean_env, run_async

_CRIU_MARK = 0xC114  # CRIU's own repair packets carry it (criu/netfilter.c)
_UPLINKS = ipaddress.ip_network("100.64.128.0/17")  # shared address space (RFC 6598), /30 for each job of a node
_UPLINK_SLOTS = 4096

_LOCK = f"""
table inet gpucr_lock {{
  chain input {{ type filter hook input priority -400; policy drop; meta mark {_CRIU_MARK:#x} accept; }}
  chain output {{ type filter hook output priority -400; policy drop; meta mark {_CRIU_MARK:#x} accept; }}
}}
"""
_NAT_INSIDE = """
table ip gpucr_nat {
  chain post { type nat hook postrouting priority srcnat; oifname "uplink" masquerade; }
}
"""
_NAT_HOST = f"""
table ip gpucr_host
delete table ip gpucr_host
table ip gpucr_host {{
  chain post {{ type nat hook postrouting priority srcnat; ip saddr {_UPLINKS} masquerade; }}
}}
"""


def namespace_name(job: str) -> str:
    return f"gpucr-{job}"


def namespace_path(job: str) -> Path:
    return Path("/run/netns") / namespace_name(job)


def address(config: NetworkConfig, node_rank: int) -> str:
    """Virtual address of a node rank."""
    return str(ipaddress.ip_network(config.subnet)[node_rank + 1])


async def _tool(argv: Sequence[str], stdin: str = "") -> None:
    (await run_async(argv, stdin=stdin, timeout_s=20, env=clean_env())).check()


async def _in_namespace(job: str, argv: Sequence[str], stdin: str = "") -> None:
    await _tool(["nsenter", f"--net={namespace_path(job)}", *argv], stdin)


async def prepare_host(config: NetworkConfig) -> None:
    """Once per start of the agent: address translation for capsules on the node's side."""
    if config.nat:
        await _tool(["nft", "-f", "-"], _NAT_HOST)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


async def create(job: str, node_rank: int, config: NetworkConfig, *, locked: bool) -> None:
    """Make the namespace of a job; a left-over of the same name is removed first.

    With locked no packet passes before `unlock`. Raises CapsuleError.
    """
    await remove(job)
    name = namespace_name(job)
    try:
        await _tool(["ip", "netns", "add", name])
        if locked:
            await lock(job)
        inside = [
            "link set lo up",
            f"addr add {address(config, node_rank)}/32 dev lo",
        ]
        await _tool(["ip", "-n", name, "-batch", "-"], "\n".join(inside) + "\n")
        if config.nat:
            await _add_uplink(job, node_rank, config)
    except GpucrError as error:
        await remove(job)
        raise CapsuleError(job=job, node="this node", reason=f"no network: {error}") from None


async def _add_uplink(job: str, node_rank: int, config: NetworkConfig) -> None:
    outside, slot = f"gpucr{job}"[:15], int(job) % _UPLINK_SLOTS
    node_side, job_side = _UPLINKS[slot * 4 + 1], _UPLINKS[slot * 4 + 2]
    await _tool(
        ["ip", "-batch", "-"],
        f"link add {outside} type veth peer name uplink netns {namespace_name(job)}\n"
        f"addr add {node_side}/30 dev {outside}\nlink set {outside} up\n",
    )
    await _tool(
        ["ip", "-n", namespace_name(job), "-batch", "-"],
        f"addr add {job_side}/30 dev uplink\nlink set uplink up\n"
        f"route add default via {node_side} dev uplink src {address(config, node_rank)}\n",
    )
    await _in_namespace(job, ["nft", "-f", "-"], _NAT_INSIDE)


async def lock(job: str) -> None:
    """Let no packet in or out but CRIU's own: while one side of a connection is frozen or missing, a packet
    would be answered with a reset or acknowledged by a socket whose state is already written."""
    await _in_namespace(job, ["nft", "-f", "-"], _LOCK)


async def unlock(job: str) -> None:
    """Open the network again; an open one stays open."""
    await _in_namespace(
        job, ["nft", "-f", "-"], "table inet gpucr_lock\ndelete table inet gpucr_lock\n"
    )


async def remove(job: str) -> None:
    """Remove the namespace with its devices; one that is gone is no error."""
    if not namespace_path(job).exists():
        return
    try:
        await _tool(["ip", "netns", "del", namespace_name(job)])
    except GpucrError:
        if namespace_path(job).exists():
            raise


def existing() -> list[str]:
    """Job ids that have a namespace on this node."""
    if not Path("/run/netns").is_dir():
        return []
    return [p.name.removeprefix("gpucr-") for p in Path("/run/netns").iterdir() if p.name.startswith("gpucr-")]
