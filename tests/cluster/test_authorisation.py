"""Who may do what with a job, at its own node and through another one's agent."""

from __future__ import annotations

import json

from jobs import JobRun, bench, kill_agent
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.conf import address

REFUSED, DONE = 80, 0
VERBS = (("status",), ("checkpoint",))


def tried(job: JobRun, user: str, node: str) -> list[int]:
    """Exit codes of each order by a user at a node."""
    return [job.gpucr(verb[0], str(job.id), "--json", user=user, node=node, check=False).status for verb in VERBS]


def operators(lab: Lab, nodes: tuple[str, ...], names: str) -> None:
    for node in nodes:
        path = lab.root(node) / "etc/gpucr/gpucr.toml"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(f"operators = [{names}]" if x.startswith("operators") else x for x in lines) + "\n")
        kill_agent(lab, node, "TERM")


def test_orders(lab: Lab) -> None:
    """Owner, root and operators may; others may not; at both nodes alike. A refused order changes nothing."""
    job = bench(lab, "authorisation").submit(count("job"), name="job").says("line 2\n")
    here, there = job.node, next(name for name in lab.nodes()[1:] if name != job.node)
    allowed = {"alice": DONE, "root": DONE, "bob": REFUSED}
    for user, code in allowed.items():
        before = job.sets()
        assert (user, [code] * 4) == (user, tried(job, user, here) + tried(job, user, there))
        assert (job.sets() == before) == (code == REFUSED)
    everywhere = json.loads(job.gpucr("status", "--all", "--json", user="bob", node=there).stdout)
    assert [] == [found for node in everywhere["nodes"] for found in node["jobs"]]
    operators(lab, (here, there), '"bob"')
    try:
        assert [DONE] * 4 == tried(job, "bob", here) + tried(job, "bob", there)
    finally:
        operators(lab, (here, there), "")
    job.whole()


def test_an_agent_of_another_cluster_is_not_heard(lab: Lab) -> None:
    """Without a certificate of the cluster there is no connection to an agent."""
    script = (
        "import socket, ssl, sys; c = ssl.create_default_context(); c.check_hostname = False\n"
        "c.verify_mode = ssl.CERT_NONE\n"
        "s = c.wrap_socket(socket.create_connection((sys.argv[1], 6827), 10))\n"
        "s.sendall(b'\\2\\0\\0\\0{}'); print(s.recv(100))"
    )
    done = lab.exec("n1", ["python3", "-c", script, address("n2")], check=False)
    # The refusal comes when we read, or the connection is closed before: never a byte of an answer.
    assert done.stdout in ("", "b''\n")
    job = lab.exec("n2", ["gpucr", "status", "--json"])  # and that agent is alive
    assert '"node": "n2"' in job.stdout
