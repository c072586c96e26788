"""Two jobs of a node with one virtual address, in namespaces of this program's own; prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from pyroute2 import IPRoute

from gpucr_hpc.capsule import network, wayout
from gpucr_hpc.config import NetworkConfig

NODE = "192.0.2.1"
JOBS = ("5", "6")
_CONNECT = """
import socket, sys
server, source = sys.argv[1:]
socket.create_connection((server, 7), timeout=5, source_address=(source, 0)).close()
"""
_SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server:
    print(flush=True)
    print(server.accept()[1][0])
"""


def inside(namespace: str | None, program: str, *args: str) -> subprocess.Popen[str]:
    enter = [] if namespace is None else ["nsenter", f"--net=/run/netns/{namespace}"]
    return subprocess.Popen([*enter, sys.executable, "-c", program, *args], text=True, stdout=subprocess.PIPE)


def seen_source(server_in: str | None, client_in: str, server: str, source: str) -> str:
    """The address of a client as a server sees it."""
    serving = inside(server_in, _SERVE, server)
    assert serving.stdout is not None
    serving.stdout.readline()
    assert inside(client_in, _CONNECT, server, source).wait() == 0
    return serving.communicate()[0].strip()


def translating() -> bool:
    return "gpucr_host" in subprocess.run(["nft", "list", "tables"], text=True, capture_output=True, check=True).stdout


def tracked(namespace: str) -> int:
    """Connections that a namespace tracks."""
    read = "print(open('/proc/sys/net/netfilter/nf_conntrack_count').read())"
    return int(inside(namespace, read).communicate()[0])


def main() -> None:
    config = NetworkConfig()
    own = network.address(config, 0)
    geometry = network.Geometry(("a",), ("a",), (NODE,))
    report: dict[str, Any] = {}
    with IPRoute() as node:
        node.link("set", index=1, state="up")
        node.addr("add", index=1, address=NODE, prefixlen=32)
        asyncio.run(network.settle_host())
        report["translating"] = [translating()]
        for job in JOBS:
            asyncio.run(network.create(job, 0, geometry, config, locked=False))
        for job in JOBS:
            capsule = network.namespace_name(job)
            report[job] = {
                "seen_in_node": seen_source(None, capsule, NODE, own),
                "seen_in_job": seen_source(capsule, capsule, own, own),
                "tracked_in_job": tracked(capsule),
                "tracked_on_the_way": tracked(wayout.PREFIX + job),
            }
        report["existing"] = sorted(network.existing())
        report["translating"].append(translating())
        asyncio.run(network.remove(JOBS[0]))
        wayout.remove_namespace(network.namespace_name(JOBS[1]))  # as an agent leaves it that is killed in `remove`
        report["half_gone"] = sorted(network.existing())
        asyncio.run(network.settle_host())  # as the next agent finds it
        report["translating"].append(translating())
        for job in network.existing():
            asyncio.run(network.remove(job))
        report["translating"].append(translating())
        report["links"] = [link.get_attr("IFLA_IFNAME") for link in node.get_links()]
    report["namespaces"] = os.listdir("/run/netns")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
