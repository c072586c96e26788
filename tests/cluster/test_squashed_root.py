"""Jobs whose files lie on a file system that squashes root, as homes on NFS do: root may not look into the user's
directories, and CRIU opens his files as him."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import Bench, bench

from gpucr_hpc.lab.cluster import Lab

MOUNT = "/mnt/squashing"
PROGRAM = """
import mmap, os, time
os.chdir("/mnt/squashing/home/work")
out = open("out.txt", "a", buffering=1)
out.write("before\\n")
private = open("../private.txt")
assert private.read(4) == "what"
held = open("map", "r+b")
memory = mmap.mmap(held.fileno(), 4096)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
out.write("after\\n")
print(open("out.txt").read().split(), private.read(), memory[:4])
"""


@contextmanager
def squashing(lab: Lab, on: Bench) -> Iterator[Path]:
    """The file system on every node, of the bench's directory; the user's home there, as the host sees it."""
    server = on.put("squashing_fs.py", Path(__file__).with_name("squashing_fs.py").read_text())
    nodes = lab.nodes()[1:]
    home = on.directory / "home"
    lab.exec("ctl", ["sh", "-c", f"umask 077; mkdir -p {on.inside}/home/work"], user=on.user)
    for name, text in (("home/private.txt", "what was there"), ("home/work/map", "mapped".ljust(4096))):
        lab.exec("ctl", ["sh", "-c", f"umask 077; printf %s '{text}' >{on.inside}/{name}"], user=on.user)
    start = f"[ -e /dev/fuse ] || mknod -m 600 /dev/fuse c 10 229; mkdir -p {MOUNT}"
    try:
        for node in nodes:
            lab.exec(node, ["sh", "-c", f"{start} && exec python3 {server} {on.inside} {MOUNT} >/dev/null 2>&1"])
            assert "denied" in lab.exec(node, ["ls", f"{MOUNT}/home"], check=False).stderr, "root is not squashed"
        yield home
    finally:
        for node in nodes:
            lab.exec(node, ["umount", "-l", MOUNT], check=False)


def test_a_job_moves(lab: Lab) -> None:
    """Twice, with a file that only its owner may open, one that grows, and one that is mapped."""
    on = bench(lab, "squashed")
    with squashing(lab, on) as home:
        job = on.submit(f"exec python3 {on.put('program.py', PROGRAM)}", name="job").says("ready\n")
        job.move()
        job.checkpoint()
        job.move()
        (home / "work/go").touch()
        job.end()
    assert job.out.splitlines()[1] == "['before', 'after']  was there b'mapp'"
