"""gpucr prune and verify at the agent: who may, what goes, what stays; on a real store."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from site_sample import IDS, JOB, InProcess, Site

from gpucr_hpc import slurm
from gpucr_hpc.agent.control import Control
from gpucr_hpc.agent.orders import Orders
from gpucr_hpc.config import load
from gpucr_hpc.errors import CheckpointMissing, JobUnknown, SlurmError, StoreError, UsageError
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_keys
from gpucr_hpc.store.posix import PosixStore

OWNER, STRANGER = 2001, 2002


class Slurm:
    """What slurmctld knows: states by job; a job that is not there is unknown, None: it does not answer."""

    def __init__(self) -> None:
        self.states: dict[str, set[str] | None] = {JOB: {"RUNNING"}}

    async def job(self, job: str) -> Any:
        states = self.states.get(job, set())
        if states is None:
            raise SlurmError(reason="test")
        if not states:
            raise JobUnknown(job=job)
        info = {"states": frozenset(states), "uid": OWNER}
        return SimpleNamespace(**info, over=slurm.JobInfo.over.fget(SimpleNamespace(states=frozenset(states))))


@pytest.fixture
def cluster(monkeypatch) -> Slurm:
    found = Slurm()
    monkeypatch.setattr(slurm, "job", found.job)
    return found


@pytest.fixture
def control(site: Site) -> Control:
    config, signing = load(site.config), load_signing_key(site.root / "keys/signing.key")
    context = SimpleNamespace(
        config=config,
        site_keys=load_site_keys(config.keys.site, config.keys.others),
        trusted=[signing.public],
        worker=lambda root, _uid, _gid: InProcess(root),
    )
    return Control(context, {}, {3000}, Orders(context, {}, {3000}))


def ask(control: Control, verb: str, uid: int = OWNER, **fields: Any) -> Any:
    return asyncio.run(getattr(control, f"do_{verb}")(uid, lambda _record: None, **fields))


def left(site: Site, job: str = JOB) -> list[str]:
    return [checkpoint for _, checkpoint in site.store.list(job)]


def pack(site: Site, checkpoint: str) -> Path:
    return Path(site.store.location) / JOB / checkpoint / "r0000-p00.pack"


def test_keep_last(site, control, cluster):
    for checkpoint in IDS:
        site.add(checkpoint)
    report = ask(control, "prune", keep_last=2, dry_run=True)
    assert [IDS[0], IDS[1]] == [r["checkpoint"] for r in report["removed"]]
    assert IDS == left(site), "a dry run removes nothing"
    report = ask(control, "prune", keep_last=2)
    assert (IDS[2:], 2) == (left(site), report["kept"])
    assert all(r["bytes_stored"] > 0 for r in report["removed"])


@pytest.mark.parametrize(
    "states", [{"RUNNING"}, {"PENDING"}, {"PENDING", "COMPLETING"}, {"NODE_FAIL", "COMPLETING"}, None]
)
def test_last_good_one_of_a_live_job_stays(site, control, cluster, states):
    """Also when Slurm cannot be asked; and good means that its files are there, not only that it is listed."""
    cluster.states[JOB] = states
    for checkpoint in IDS[:3]:
        site.add(checkpoint)
    pack(site, IDS[2]).unlink()
    ask(control, "prune", uid=0, keep_last=0, keep_within_s=0)
    assert [IDS[1], IDS[2]] == left(site)


@pytest.mark.parametrize("states", [{"COMPLETED"}, {"FAILED"}, {"CANCELLED"}, set()])
def test_all_of_a_job_that_is_over_may_go(site, control, cluster, states):
    cluster.states[JOB] = states
    for checkpoint in IDS[:3]:
        site.add(checkpoint)
    ask(control, "prune", uid=0, keep_last=1)
    assert [IDS[2]] == left(site)
    ask(control, "prune", uid=0, keep_last=0)
    assert [] == left(site)


def test_removed_by_somebody_else_meanwhile(site, control, cluster, monkeypatch):
    """A periodic checkpoint of the job has just removed the same one: that is what was wanted."""
    for checkpoint in IDS[:2]:
        site.add(checkpoint)
    delete = PosixStore.delete

    def twice(store: PosixStore, job: str, checkpoint: str) -> None:
        delete(store, job, checkpoint)
        delete(store, job, checkpoint)

    monkeypatch.setattr(PosixStore, "delete", twice)
    report = ask(control, "prune", keep_last=1)
    assert [{"job": JOB, "checkpoint": IDS[0]}] == [{k: r[k] for k in ("job", "checkpoint")} for r in report["removed"]]
    assert "problem" not in report["removed"][0]
    assert [IDS[1]] == left(site)


def test_what_another_job_began_with_stays(site, control, cluster):
    """As long as that is not over and has no checkpoint of its own."""
    cluster.states |= {JOB: {"COMPLETED"}, "50": {"RUNNING"}}
    for checkpoint in IDS[:2]:
        site.add(checkpoint)
    site.store.put_record(JOB, "clone-0", json.dumps({"job": "50", "of": JOB, "checkpoint": IDS[0]}).encode())
    report = ask(control, "prune", keep_last=0)
    assert ([IDS[0]], [IDS[1]], 1) == (left(site), [r["checkpoint"] for r in report["removed"]], report["kept"])
    cluster.states["50"] = {"FAILED"}
    ask(control, "prune", keep_last=0, dry_run=True)
    assert [IDS[0]] == left(site)
    ask(control, "prune", keep_last=0)
    assert [] == left(site)


def test_users_prune_their_own(site, control, cluster):
    """A stranger's order, even with the job's number, removes nothing; an operator's does."""
    for checkpoint in IDS[:2]:
        site.add(checkpoint)
    report = ask(control, "prune", STRANGER, job=JOB, keep_last=1, orphans_s=7200)
    assert ([], []) == (report["removed"], report["orphans"])
    assert IDS[:2] == left(site)
    ask(control, "prune", 3000, job=JOB, keep_last=1)
    assert [IDS[1]] == left(site)


def test_other_jobs_are_judged_by_themselves(site, control, cluster):
    """The newest of each live job stays, whatever is newer elsewhere."""
    site.add(IDS[0], job="40")
    site.add(IDS[1])
    site.add(IDS[2])
    cluster.states["40"] = {"PENDING"}
    ask(control, "prune", uid=0, keep_within_s=0)
    assert ([IDS[0]], [IDS[2]]) == (left(site, "40"), left(site))


def test_remains_of_dead_writers(site, control, cluster):
    """Only old ones, and only of jobs that the caller may act on; nobody reaches into what may be in use."""
    site.add(IDS[0])
    for job, checkpoint in ((JOB, IDS[1]), ("40", IDS[1]), (JOB, IDS[2])):
        site.store.begin(job, checkpoint).create("r0000-p00.pack").close()
    old = time.time() - 90000
    for path in (f"{JOB}/{IDS[1]}.partial", f"40/{IDS[1]}.partial"):
        where = Path(site.store.location) / path
        for each in (*where.iterdir(), where):
            os.utime(each, (old, old))
    with pytest.raises(UsageError, match="may be in use"):
        ask(control, "prune", orphans_s=60)
    report = ask(control, "prune", STRANGER, job="40", orphans_s=86400)
    assert [] == report["orphans"]
    report = ask(control, "prune", orphans_s=86400, dry_run=True)
    assert [(JOB, f"{IDS[1]}.partial")] == [(o["job"], o["name"]) for o in report["orphans"]]
    assert 3 == len(site.store.orphans(0))
    ask(control, "prune", orphans_s=86400)
    assert {("40", f"{IDS[1]}.partial"), (JOB, f"{IDS[2]}.partial")} == {(o.job, o.name) for o in site.store.orphans(0)}
    ask(control, "prune", 0, orphans_s=86400)
    assert [f"{IDS[2]}.partial"] == [o.name for o in site.store.orphans(0)]
    assert [IDS[0]] == left(site)


def test_root_looks_into_a_users_store_as_its_owner(site, control, cluster, tmp_path):
    """What a user puts in its place can lead root nowhere; nothing is made where there is none."""
    asked: list[tuple[str, int, int]] = []

    def worker(root: str, uid: int, gid: int) -> InProcess:
        asked.append((root, uid, gid))
        return InProcess(root)

    control._context.worker, control._context.store_root = worker, str
    own = tmp_path / "own"
    own.mkdir()
    if os.geteuid() == 0:
        os.chown(own, OWNER, 100)
    status = own.stat()
    ask(control, "list", uid=0, directory=str(own))
    assert [(str(own), status.st_uid, status.st_gid)] == asked
    (tmp_path / "link").symlink_to(own)
    for place in ("link", "missing"):
        with pytest.raises(StoreError, match=place):
            ask(control, "list", uid=0, directory=str(tmp_path / place))
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("limits", [{"keep_last": -1}, {"keep_within_s": -1.0}])
def test_negative_limits(control, cluster, limits):
    with pytest.raises(UsageError, match="negative"):
        ask(control, "prune", **limits)


def test_verify_looks_at_every_one(site, control, cluster):
    """Good ones, a flipped bit that only deep finds, a missing file, a cut manifest: each with its own word."""
    for checkpoint in IDS:
        site.add(checkpoint)
    data = bytearray(pack(site, IDS[0]).read_bytes())
    data[-1] ^= 1
    pack(site, IDS[0]).write_bytes(data)
    pack(site, IDS[1]).unlink()
    manifest = pack(site, IDS[2]).with_name("manifest")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    shallow = ask(control, "verify", uid=0)
    assert [True, False, False, True] == [r["good"] for r in shallow["checkpoints"]]
    assert not shallow["good"]
    deep = ask(control, "verify", uid=0, job=JOB, deep=True)
    assert [False, False, False, True] == [r["good"] for r in deep["checkpoints"]]
    for number, name in enumerate(("r0000-p00.pack: damaged or altered: chunk 0", "r0000-p00.pack", "manifest")):
        assert name in deep["checkpoints"][number]["problem"]["message"]
    assert ask(control, "verify", checkpoints=[IDS[3]], deep=True)["good"]
    with pytest.raises(CheckpointMissing):
        ask(control, "verify", STRANGER, checkpoints=[IDS[3]])
