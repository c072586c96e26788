"""What others may not see or do, and that no plain byte of a job reaches the store."""

from __future__ import annotations

import json
import textwrap

from jobs import bench, kill_agent
from programs import count

from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

MARKER = "kept-in-memory-1f0c9a7e"

SECRETS = """
    import os, time
    word = "-".join(["kept", "in", "memory", "1f0c9a7e"]).encode()
    data = word * 2000
    for path in ("/tmp/plain", "/dev/shm/plain"):
        with open(path, "wb") as file:
            file.write(data)
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.1)
    assert all(open(path, "rb").read() == data for path in ("/tmp/plain", "/dev/shm/plain"))
    print("whole", data.count(word))
"""


def test_no_plain_data_in_the_store(lab: Lab) -> None:
    """A marker in memory, /tmp and /dev/shm of the job is in no file that a checkpoint leaves anywhere."""
    on = bench(lab, "users-secrets")
    job = on.submit(f"exec python3 {on.put('secrets.py', SECRETS)}", name="job").says("ready\n")
    pid = next(p for p in lab.pids(job.node) if MARKER.encode() not in _argv(p) and _holds(p))
    assert pid
    job.checkpoint()
    job.checkpoint("--requeue")
    found = []
    for node in lab.nodes():
        places = "/var/lib /var/spool /var/tmp /var/log /tmp /run" + (" /shared/gpucr" if node == "ctl" else "")
        done = lab.exec(node, ["sh", "-c", f"grep -rlaF {MARKER} {places}"], check=False)
        found += done.stdout.split()
    assert found == []
    assert len(job.sets()) == 2
    job.back(1)
    (on.directory / "go").touch()
    assert job.end().out == "ready\nwhole 2000\n"


def _argv(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _holds(pid: int) -> bool:
    """Whether the marker is in the writable memory of a process."""
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, mode = line.split()[:2]
                start, end = (int(n, 16) for n in span.split("-"))
                if mode.startswith("rw") and end - start < 1 << 28:
                    memory.seek(start)
                    if MARKER.encode() in memory.read(end - start):
                        return True
    except OSError:
        pass
    return False


# Speaks as the supervisor of another's job, from inside a batch step of its own; prints what the agent answers.
FORGED = """
    import os, socket, struct, sys

    def frame(kind, **keys):
        payload = b"".join(f"{k}={v}".encode() + b"\\0" for k, v in keys.items())
        return b"GC" + struct.pack("<HII", 1, kind, len(payload)) + payload

    def answers(sock):
        sock.settimeout(3)
        data = b""
        try:
            while part := sock.recv(65536):
                data += part
        except OSError:
            pass
        return data

    job, mode = sys.argv[1:]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/run/gpucr/agent.sock")
    sock.sendall(frame(1, JOB=job, STEP="batch", RANK=0, RESTART=0, NODES="", NODECOUNT=1, NODE="", SIGNAL=50, DIR="",
                       INTERVAL="", MODE=mode, ATTACHED=1, NOTICE=0))
    try:
        sock.sendall(frame(11, STATUS=0, NOTICE=1))
    except OSError:
        pass
    print("answer", answers(sock), flush=True)
    try:
        shepherd = socket.socket(socket.AF_UNIX)
        shepherd.connect(f"/run/gpucr/jobs/{job}/user/shepherd.sock")
        print("shepherd reached")
    except OSError as error:
        print("shepherd", error.strerror)
"""


def test_others_see_and_do_nothing(lab: Lab) -> None:
    """bob can neither checkpoint nor list, show or verify alice's; a HELLO of his in her job's name is refused and
    changes nothing, also right after the agent came anew; root may."""
    alice, bob = bench(lab, "users-alice"), bench(lab, "users-bob", "bob")
    job = alice.submit(count("job"), name="job").says("line 2\n")
    name = job.checkpoint()["checkpoint"]
    node = job.node
    refused = {
        ("checkpoint", str(job.id)): 80,
        ("checkpoint", str(job.id), "--requeue"): 80,
        ("show", name): 62,
        ("verify", name): 62,
    }
    for argv, code in refused.items():
        asked = job.gpucr(*argv, "--json", user="bob", check=False)
        assert (argv, asked.status) == (argv, code)
        assert str(job.id) not in asked.stdout
    for argv in (("list",), ("list", str(job.id)), ("status",)):
        assert json.loads(job.gpucr(*argv, "--json", user="bob").stdout).get("jobs", []) == []
        assert name not in job.gpucr(*argv, "--json", user="bob").stdout
    assert name in job.gpucr("list", "--json").stdout
    assert name in job.gpucr("list", "--json", user="root").stdout
    forged = bob.put("forged.py", textwrap.dedent(FORGED))
    for number, mode in enumerate(("first", "again", "first", "again")):
        if number == 2:  # her supervisor cannot connect to the new agent before he does
            lab.exec(node, ["pkill", "-STOP", "-x", "gpucr-task"])
            kill_agent(lab, node)
        thief = bob.submit(f"exec python3 {forged} {job.id} {mode}", "-w", node, name=f"thief{number}", protected=False)
        thief.end()
        assert f"is of job {thief.id}, not of job {job.id}" in thief.raw
        assert "shepherd Permission denied" in thief.raw
    lab.exec(node, ["pkill", "-CONT", "-x", "gpucr-task"])
    seen = len(job.out.splitlines())
    wait_until(lambda: len(job.out.splitlines()) > seen + 3, 20, "alice's job to go on")
    assert job.sets() == [name]
    job.move()
    job.whole()
