"""A full store, and sets that are missing or damaged when their job comes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import JobRun, bench, configured
from programs import count

from gpucr_hpc import proc
from gpucr_hpc.image.layout import HEADER_BYTES
from gpucr_hpc.lab.cluster import Lab
from gpucr_hpc.lab.wait import wait_until

HOLDS = """
    import hashlib, os, time
    data = os.urandom(110 << 20)
    print("sum", hashlib.sha256(data).hexdigest(), flush=True)
    n = 0
    while not os.path.exists("go"):
        n += 1
        print("tick", n, flush=True)
        time.sleep(0.1)
    print("sum", hashlib.sha256(data).hexdigest(), flush=True)
"""


@contextmanager
def small_store(lab: Lab, node: str) -> Iterator[Callable[[int], None]]:
    """A store of its own for one node, 40 MB; the function changes its size."""
    options = "size=40m,mode=700,uid=$(id -u gpucr),gid=$(id -g gpucr)"
    lab.exec(node, ["sh", "-c", f"mount -t tmpfs -o {options} tmpfs /shared/gpucr"])
    try:
        yield lambda mb: lab.exec(node, ["mount", "-o", f"remount,size={mb}m", "/shared/gpucr"]) and None
    finally:
        lab.exec(node, ["umount", "-l", "/shared/gpucr"])


def test_full_store(lab: Lab) -> None:
    """No space from the start, and no space in the middle: the job goes on and says why, no half set is left, and
    the next checkpoint works when there is room."""
    on = bench(lab, "store-full")
    with small_store(lab, "n1") as resize:
        job = on.submit(f"exec python3 {on.put('holds.py', HOLDS)}", "-w", "n1", name="holds").says("tick 1\n")

        def refused() -> None:
            asked = job.gpucr("checkpoint", str(job.id), check=False)
            assert (asked.status, "no space left" in asked.stderr) == (61, True), asked.stderr
            assert "the next set" not in job.raw
            found = lab.exec("n1", ["find", f"/shared/gpucr/{job.id}", "-type", "f"]).stdout.split()
            assert [path for path in found if "T" in Path(path).parent.name] == []
            ticks = job.out.count("tick")
            job.says(f"tick {ticks + 3}\n")

        refused()
        resize(100)
        refused()
        assert job.raw.count("checkpoint not possible, the job runs on") == 2
        assert "no space left" in job.raw
        resize(400)
        job.checkpoint()
        (on.directory / "go").touch()
        job.end()
        sums = [line for line in job.out.splitlines() if line.startswith("sum")]
        assert sums[0] == sums[1]
        assert len(sums) == 2


def flip(path: Path) -> None:
    """In every chunk: not all are read at a restore, what only `gpucr inspect` shows is not."""
    data = bytearray(path.read_bytes())
    for at in range(HEADER_BYTES, len(data), 8):
        data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped-pack": ("*.pack*", flip),
    "cut-pack": ("*.pack*", cut),
    "no-pack": ("*.pack*", Path.unlink),
    "flipped-manifest": ("manifest", flip),
    "cut-manifest": ("manifest", cut),
    "no-manifest": ("manifest", Path.unlink),
    "no-set": (".", shutil.rmtree),
}


def leave_and_stay(lab: Lab, job: JobRun) -> None:
    """Checkpoint and requeue, held."""
    lab.exec("ctl", ["scontrol", "hold", str(job.id)])
    job.checkpoint("--requeue")
    lab.wait_job(job.id, "PENDING")


def harm(job: JobRun, kind: str, which: int = -1) -> str:
    """Damage a set of the job; the name that must be in the message. A pack is the largest of the set's own: one that
    it refers to is, by a hard link, the earlier set's as well."""
    pattern, action = DAMAGE[kind]
    directory = job.store() / job.sets()[which]
    own = (p for p in directory.glob("**/*") if p.match(pattern) and p.stat().st_nlink == 1)
    path = directory if pattern == "." else max(own, key=lambda p: p.stat().st_size)
    action(path)
    return directory.name if kind in ("no-set", "no-manifest") else path.name


@pytest.mark.parametrize("kinds", [list(DAMAGE)[:4], list(DAMAGE)[4:]], ids=["packs", "manifests"])
def test_a_damaged_set_is_named_and_the_older_one_used(lab: Lab, kinds: list[str]) -> None:
    """The job goes on from the set before; what it had printed after that is moved aside, not doubled."""
    on = bench(lab, "store-older")
    jobs, names, olds = {}, {}, {}
    for kind in kinds:
        jobs[kind] = on.submit(count(kind), name=kind)
    for kind, job in jobs.items():
        job.says("line 2\n")
        olds[kind] = job.checkpoint()["checkpoint"]
        seen = len(job.out.splitlines())
        job.says(f"line {seen + 5}\n")
        leave_and_stay(lab, job)
        names[kind] = harm(job, kind)
    for job in jobs.values():
        lab.exec("ctl", ["scontrol", "release", str(job.id)])
    for kind, job in jobs.items():
        job.says("restored on")
        assert f"from checkpoint {olds[kind]}" in job.raw
        assert names[kind] in job.raw.split("restored on")[0], kind
        assert "moved to" in job.raw
        (job.directory / f"{kind}.stop").touch()
        job.end(3)
        numbers = len([line for line in job.out.splitlines() if line.startswith("line ")])
        assert job.out == "".join(f"line {n}\n" for n in range(1, numbers + 1)) + f"the last of {numbers} lines\n"


def test_without_a_good_set_the_job_is_held(lab: Lab) -> None:
    """Policy hold: refused with the file's name, held, and after the repair and a release it goes on."""
    on = bench(lab, "store-hold")
    jobs = {kind: on.submit(count(kind), name=kind) for kind in ("flipped-pack", "cut-manifest", "no-set")}
    for kind, job in jobs.items():
        job.says("line 3\n")
        leave_and_stay(lab, job)
        copy = job.directory / f"{kind}.saved"
        proc.run(["cp", "-a", str(job.store()), str(copy)]).check()
        name = harm(job, kind)
        lab.exec("ctl", ["scontrol", "release", str(job.id)])
        job.says("The job is held with its checkpoints kept", 60)
        assert name in job.raw
    for kind, job in jobs.items():
        wait_until(lambda job=job: job.info["job_state"] == ["PENDING"], 60, "the job to be held")
        assert job.info["priority"]["number"] == 0
        saved = job.directory / f"{kind}.saved"
        lab.exec("ctl", ["sh", "-c", f"cp -a {on.inside}/{saved.name}/. /shared/gpucr/{job.id}/"])
        lab.exec("ctl", ["scontrol", "release", str(job.id)])
    for job in jobs.values():
        job.back(1)
        job.whole()


def test_without_a_good_set_from_scratch(lab: Lab) -> None:
    """Policy scratch: the job says so and begins again."""
    on = bench(lab, "store-scratch")
    with configured(lab, 'on_restore_failure = "scratch"'):
        jobs = {kind: on.submit(count(kind), name=kind) for kind in ("flipped-pack", "no-set")}
        for kind, job in jobs.items():
            job.says("line 3\n")
            leave_and_stay(lab, job)
            name = harm(job, kind)
            lab.exec("ctl", ["scontrol", "release", str(job.id)])
            job.says("the job starts from its beginning")
            assert name in job.raw
        for kind, job in jobs.items():
            wait_until(lambda job=job: job.out.count("line 1\n") == 2, 30, "the second beginning")
            (job.directory / f"{kind}.stop").touch()
            job.end(3)


def test_work_after_the_last_set_is_rolled_back_when_a_node_dies(lab: Lab) -> None:
    """C1, C46: power loss 3 s after a checkpoint: a file that the job had open and its output have each line once;
    what was written after the checkpoint is kept beside."""
    on = bench(lab, "store-node")
    job = on.submit("""
        exec 5>>appended
        for ((i = 1; i <= 60; i++)); do
            echo "line $i"; echo "$i" >&5; sleep 0.1
            until [ $i -ne 20 -o -e on ] && [ $i -ne 45 -o -e go ]; do sleep 0.1; done
        done
        exit 6
    """, name="job")  # fmt: skip
    set_name = job.says("line 10\n").checkpoint()["checkpoint"]
    (job.directory / "on").touch()
    job.says("line 30\n")
    node = job.node
    lab.kill(node)
    job.back(1, 90)
    assert job.node != node
    (job.directory / "go").touch()
    job.end(6)
    assert job.out == "".join(f"line {n}\n" for n in range(1, 61))
    assert job.file("appended") == "".join(f"{n}\n" for n in range(1, 61))
    assert job.file(f"appended.after-{set_name}").split()[-1] >= "29"
    assert "line 30" in job.file(f"job.out.after-{set_name}")
