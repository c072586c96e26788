"""What a restored step is for Slurm and for the network: its limits, its accounting, names, later steps."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from jobs import bench
from test_steps import TWO

from gpucr_hpc.lab import conf
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

# Holds 200 MiB; says where it is every 0.2 s; takes twice as much again when NAME.more is there. argv: NAME.
HOG = r"""
import os, sys, time
name = f"{sys.argv[1]}.{os.environ['SLURM_PROCID']}"
held = [b"x" * (200 << 20)]
while True:
    with open(name + ".new", "w") as file:
        file.write(open("/proc/self/cgroup").read())
    os.rename(name + ".new", name)
    if os.path.exists(f"{sys.argv[1]}.more"):
        held.append(b"y" * (400 << 20))
        print("it got more than its limit", flush=True)
        sys.exit(9)
    time.sleep(0.2)
"""
# Answers every question for an address with 192.0.2.7.
NAMES = r"""
import os, socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("0.0.0.0", 53))
print(os.getpid(), flush=True)
while True:
    data, peer = sock.recvfrom(512)
    end = data.index(b"\0", 12) + 5
    question, kind = data[12:end], data[end - 4:end - 2]
    answer = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton("192.0.2.7") if kind == b"\0\1" else b""
    head = data[:2] + b"\x85\x80\0\1" + (b"\0\1" if answer else b"\0\0") + b"\0\0\0\0"
    sock.sendto(head + question + answer, peer)
"""


def test_limits_and_accounting_of_the_new_step_hold(lab: Lab) -> None:
    """After a move each task is in the new step's control groups and on its list of processes; its limit still ends it.

    Its memory is charged to the job: on the first node to the batch step, in whose groups the tree comes back.
    """
    at = bench(lab, "limits")
    at.put("hog.py", HOG)
    script = "srun -n 1 true\nsrun -n 2 -N 2 --mem=400M python3 hog.py hog\necho status $?\n"
    job = at.submit(script, *TWO)
    files = [at.directory / f"hog.{task}" for task in (0, 1)]
    wait_until(lambda: job.over or all(f.exists() for f in files), 60, "both tasks")
    job.move()
    for file in files:
        file.unlink()
    wait_until(lambda: job.over or all(f.exists() for f in files), 60, "both tasks again")
    nodes = lab.exec("ctl", ["scontrol", "show", "hostnames", job.info["nodes"]]).stdout.split()
    # A new run counts its steps anew, so number 1 is number 0 now; the finished one does not come again.
    steps = lab.exec("ctl", ["squeue", "-h", "-s", "-j", str(job.id), "-o", "%i"]).stdout.split()
    assert f"{job.id}.0" in steps, steps
    for node, file in zip(nodes, files, strict=True):
        groups = {line.split(":")[1]: line.split(":")[2] for line in file.read_text().splitlines()}
        ours = [groups[name] for name in ("memory", "freezer") if name in groups] or [groups[""]]
        assert all(f"job_{job.id}/step_0" in group for group in ours), groups
        listed = lab.exec(node, ["scontrol", "listpids", f"{job.id}.0", node]).stdout
        hogs = lab.exec(node, ["pgrep", "-f", "hog.py hog$"]).stdout.split()
        assert set(hogs) & {line.split()[0] for line in listed.splitlines()[1:]}, (listed, hogs)
        group = "/step_0" if node != job.node else f"/job_{job.id}"
        used = charged(lab, node, ours[0], group)
        assert used > 200 << 20, f"{used} bytes charged to {group} on {node}"
    (at.directory / "hog.more").touch()
    job.end(timeout_s=120)
    assert "it got more" not in job.out
    assert "status 0\n" not in job.out, job.raw


def charged(lab: Lab, node: str, group: str, upto: str) -> int:
    """Bytes of memory that are charged to the part of a control group's path that ends with `upto`."""
    path = group[: group.index(upto) + len(upto)]
    for top, name in (("memory", "memory.usage_in_bytes"), ("", "memory.current")):
        done = lab.exec(node, ["sh", "-c", f"cat /sys/fs/cgroup/{top}{path}/{name}"], check=False)
        if done.status == 0:
            return int(done.stdout)
    raise AssertionError(f"no memory figures for {path} on {node}")


def test_later_steps_start_on_the_new_nodes(lab: Lab) -> None:
    """A step that the script reaches after the move runs where the job is now, under the names that it had."""
    at = bench(lab, "later")
    mark = f"/var/tmp/later-{at.directory.name}"
    script = f"until [ -e go ]; do sleep 0.1; done\nsrun -n 2 -N 2 sh -c 'hostname; touch {mark}' | sort\n"
    job = at.submit(script, *TWO).running()
    first = lab.exec("ctl", ["scontrol", "show", "hostnames", job.info["nodes"]]).stdout
    wait_until(lambda: job.gpucr("status", check=False).status == 0, 30, "the agent")
    wait_until(lambda: str(job.id) in job.gpucr("status").stdout, 30, "the job to be protected")
    job.move()
    second = lab.exec("ctl", ["scontrol", "show", "hostnames", job.info["nodes"]]).stdout.split()
    (at.directory / "go").touch()
    job.end()
    assert job.out == first
    there = [node for node in lab.nodes()[1:] if (lab.root(node) / mark.lstrip("/")).exists()]
    for node in there:
        (lab.root(node) / mark.lstrip("/")).unlink()
    assert there == second


@contextmanager
def name_server(lab: Lab) -> Iterator[None]:
    """A name server on the controller, and all nodes ask it."""
    server = subprocess.Popen(lab.exec_argv("ctl", ["python3", "-c", NAMES]), stdout=subprocess.PIPE, text=True)
    paths = [lab.root(node) / "etc/resolv.conf" for node in lab.nodes()[1:]]
    before = [path.read_bytes() if path.exists() else None for path in paths]
    try:
        assert server.stdout is not None
        pid = server.stdout.readline().strip()
        assert pid.isdigit(), "no name server"
        for path in paths:
            path.write_text(f"nameserver {conf.address('ctl')}\n")
        yield
    finally:
        for path, content in zip(paths, before, strict=True):
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
        lab.exec("ctl", ["kill", pid], check=False)  # nsenter has forked: it is another process than ours
        server.communicate()


def test_names_of_the_site_are_found_in_the_capsule(lab: Lab) -> None:
    """The node's name server is asked through the job's network, before and after a move, also by a step."""
    at = bench(lab, "names")
    ask = "getent ahostsv4 db.example.org | head -1 | cut -d' ' -f1"
    script = f'{ask}\nuntil [ -e go ]; do sleep 0.1; done\n{ask}\nsrun -n 2 -N 2 sh -c "{ask}"\n'
    with name_server(lab):
        job = at.submit(script, *TWO).says("192.0.2.7\n")
        job.move()
        (at.directory / "go").touch()
        job.end()
    assert job.out == "192.0.2.7\n" * 4


def test_what_cannot_be_moved_is_said(lab: Lab) -> None:
    """A step from another node, a heterogeneous job, salloc and a lone srun: a word each, nothing protected by half."""
    at = bench(lab, "said")
    script = "srun -n 1 -N 1 -r 1 sh -c 'srun -n 1 true; echo status $?'\n"
    other = at.submit(script, *TWO, name="other")
    het = at.submit("#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH hetjob\n#SBATCH --ntasks=1\necho runs\n", name="het")
    other.end()
    assert "first node only" in other.raw
    assert other.out.endswith("status 1\n")
    het.says("runs\n")
    assert "without protection: cannot be checkpointed: it is part of a heterogeneous job" in het.raw
    alloc = lab.exec("ctl", ["salloc", "-n", "1", "--checkpoint-on-preempt", "true"], user="alice")
    assert "gpucr: only batch jobs are protected" in alloc.stderr
    lone = lab.exec("ctl", ["srun", "-n", "1", "--checkpoint-on-preempt", "true"], user="alice")
    assert "gpucr: only batch jobs are protected" in lone.stderr
