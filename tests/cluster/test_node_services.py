"""Jobs that are connected to services of the node over Unix sockets: SSSD's, the journal's, and any other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import Bench, bench

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

PIPE, LOG, OTHER = "/var/lib/sss/pipes/nss", "/run/systemd/journal/dev-log", "/run/other.sock"

# Answers with the node's name, as long as the client stays, as SSSD does; takes datagrams.
SERVICE = f"""
import os, socket, sys, threading
def serve(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    server = socket.create_server(path, family=socket.AF_UNIX)
    os.chmod(path, 0o666)
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
def answer(client):
    while client.recv(100):
        client.sendall(sys.argv[1].encode().ljust(8))
for path in ("{PIPE}", "{OTHER}"):
    threading.Thread(target=serve, args=(path,), daemon=True).start()
os.makedirs(os.path.dirname("{LOG}"), exist_ok=True)
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.bind("{LOG}")
os.chmod("{LOG}", 0o666)
while True:
    with open("/run/logged", "a") as file:
        file.write(log.recv(100).decode() + "\\n")
"""

# As libnss_sss and syslog(3) do: a connection is kept, and made again when it was hung up.
CLIENT = f"""
import os, select, socket, time
def connect(path, kind):
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.connect(path)
    return sock
def who(sock):
    sock.sendall(b"who")
    return sock.recv(8, socket.MSG_WAITALL).decode().strip()
def log(text):
    global logger
    try:
        logger.send(text)
    except OSError:
        logger.close()
        logger = connect("{LOG}", socket.SOCK_DGRAM)
        logger.send(text)
def told(name):
    while not os.path.exists(name):
        time.sleep(0.05)
pipe, logger = connect("{PIPE}", socket.SOCK_STREAM), connect("{LOG}", socket.SOCK_DGRAM)
inside = socket.create_server("inside", family=socket.AF_UNIX)
ours = connect("inside", socket.SOCK_STREAM)
theirs = inside.accept()[0]
print("on", who(pipe), flush=True)
log(b"first")
for name in ("once", "twice"):
    told(name)
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):
        print("hung up")
        pipe = connect("{PIPE}", socket.SOCK_STREAM)
    print("on", who(pipe), flush=True)
    log(name.encode())
ours.sendall(b"whole")
assert theirs.recv(5, socket.MSG_WAITALL) == b"whole"
print("ok")
"""

# Connected to a service that nobody says may be hung up on.
BOUND = f"""
import os, socket, time
sock = socket.socket(socket.AF_UNIX)
sock.connect("{OTHER}")
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
sock.sendall(b"who")
assert sock.recv(8, socket.MSG_WAITALL)
print("ok")
"""


@pytest.fixture
def on(lab: Lab) -> Iterator[Bench]:
    """Every node has the services."""
    on = bench(lab, "node-services")
    service = on.put("service.py", SERVICE)
    nodes = lab.nodes()[1:]
    for node in nodes:
        lab.exec(node, ["sh", "-c", f"python3 {service} {node} >/run/service.out 2>&1 & echo $! >/run/service.pid"])
    for node in nodes:
        sockets = [lab.root(node) / path.lstrip("/") for path in (PIPE, LOG, OTHER)]
        wait_until(lambda sockets=sockets: all(path.exists() for path in sockets), 20, f"the services of {node}")
    yield on
    for node in nodes:
        end = f"kill $(cat /run/service.pid); rm -rf /run/service.* /run/logged {OTHER} /var/lib/sss /run/systemd"
        lab.exec(node, ["sh", "-c", end])


def test_clients_that_connect_anew(on: Bench) -> None:
    """Hung up on at each checkpoint, also where the job goes on; after a move they ask the other node."""
    job = on.submit(f"exec python3 {on.put('client.py', CLIENT)}", name="job").says("on n")
    first = job.node
    job.checkpoint()
    (on.directory / "once").touch()
    job.says(f"hung up\non {first}\n").move()
    (on.directory / "twice").touch()
    job.end()
    (second,) = {node for node in on.lab.nodes()[1:] if "twice" in (on.lab.root(node) / "run/logged").read_text()}
    assert second != first
    assert job.out == f"on {first}\nhung up\non {first}\nhung up\non {second}\nok\n"
    assert (on.lab.root(first) / "run/logged").read_text() == "first\nonce\n"


def test_another_service_is_named(on: Bench) -> None:
    job = on.submit(f"exec python3 {on.put('bound.py', BOUND)}", name="job").says("ready\n")
    asked = job.gpucr("checkpoint", str(job.id), check=False)
    assert asked.status == 44
    assert f" is connected to {OTHER}, a service outside of the job, which cannot be saved" in asked.stderr
    (on.directory / "go").touch()
    assert job.end().out == "ready\nok\n"
