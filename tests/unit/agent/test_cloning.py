"""A new job from another one's checkpoint: which one, for whom, and where the batch script is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from site_sample import IDS, InProcess, Site

from gpucr_hpc.agent import batchscript, claims, cloning
from gpucr_hpc.agent.catalog import Catalog, Keys
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CheckpointMissing, CheckpointUnfit, GpucrError, SlurmError
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_key
from gpucr_hpc.model import Manifest
from gpucr_hpc.slurm.query import JobInfo, parse_job

UID = 2001  # whose Site.add makes checkpoints


def info(nodes: int = 2, tasks: int = 4, cpus: int = 8) -> JobInfo:
    return parse_job("7", json.dumps({"jobs": [{"job_id": 7, "node_count": nodes, "tasks": tasks, "cpus": cpus}]}))


def manifest(files: dict[int, list[str]] | None = None, *, script: bool = True, **meta: Any) -> Manifest:
    ranks: list[dict[str, Any]] = [{"files": [{"path": p} for p in (files or {}).get(n, [])]} for n in range(2)]
    if script:
        ranks[0]["script"] = {"path": "/var/spool/slurmd/job00041/slurm_script", "mode": 0o700}
    images = [SimpleNamespace(node_rank=n) for n in range(2)]
    table = {"ranks": ranks, "shape": {"tasks": 4, "cpus": 8}, **meta}
    return Manifest(
        checkpoint=IDS[0], job="41", uid=UID, gid=100, reason="demand", run=0, images=cast(Any, images), slots=[],
        meta=table,
    )  # fmt: skip


def test_the_same_shape_or_more_processors_fits() -> None:
    cloning.check(manifest(), info())
    cloning.check(manifest(), info(cpus=16))
    cloning.check(manifest(shape={}), info(tasks=1))  # of an agent that did not note it


@pytest.mark.parametrize(
    ("have", "words"),
    [
        (info(nodes=1), "2 nodes, this job has 1: use --nodes=2"),
        (info(tasks=5), "4 tasks, this job has 5: use --ntasks=4"),
        (info(cpus=7), "8 processors, this job has 7"),
    ],
)
def test_another_shape_does_not_fit(have: JobInfo, words: str) -> None:
    with pytest.raises(CheckpointUnfit, match=words):
        cloning.check(manifest(), have)


def test_a_set_without_its_script_does_not_fit() -> None:
    with pytest.raises(CheckpointUnfit, match="the batch script is not in it"):
        cloning.check(manifest(script=False), info())


@pytest.fixture
def catalog(site: Site) -> Iterator[Catalog]:
    """That of the site's store."""
    keys, root = site.root / "keys", f"{site.root}/store"
    signing = load_signing_key(keys / "signing.key")
    context = SimpleNamespace(trusted=[signing.public], site_keys=(load_site_key(keys / "site.key"),))
    worker = InProcess(root)
    yield Catalog(cast(Keys, context), cast(WorkerClient, worker), root)
    asyncio.run(worker.__aexit__())


def test_own_sets_only_are_found(site: Site, catalog: Catalog) -> None:
    """By their id alone; another user's is as if it were not there, a damaged one says so."""
    site.add(IDS[0], job="41")
    site.add(IDS[1], job="42")
    assert asyncio.run(catalog.find(IDS[1], UID)).job == "42"
    for checkpoint, uid in ((IDS[1], UID + 1), (IDS[2], UID)):
        with pytest.raises(CheckpointMissing):
            asyncio.run(catalog.find(checkpoint, uid))
    (site.root / "store/42" / IDS[1] / "manifest").write_bytes(b"no manifest")
    with pytest.raises(GpucrError, match="manifest"):
        asyncio.run(catalog.find(IDS[1], UID))


@pytest.mark.parametrize(
    ("files", "alive", "refused"),
    [
        ({0: ["/x"]}, {"41"}, "job 41 is not over and writes to /x, too"),
        ({1: ["/x", "/a"]}, {"43"}, "job 43 is not over and writes to /a and 1 more, too"),
        ({0: ["/x"]}, {"40"}, "job 40"),
        ({0: ["/x"]}, {"7"}, ""),
        ({}, {"41", "43"}, ""),
    ],
    ids=["the first job", "another clone", "the job before the first", "itself", "no file is open"],
)
def test_two_that_write_the_same_files(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, files: dict[int, list[str]], alive: set[str], refused: str
) -> None:
    """What has begun as job 40 went on as 41 and 43; now comes 7."""

    async def is_live(job: str) -> bool:
        return job in alive

    monkeypatch.setattr(claims, "is_live", is_live)
    for number, other in enumerate(("41", "43")):
        claim = {"job": other, "of": "40", "checkpoint": IDS[0]}
        asyncio.run(catalog.note_new("40", claims.record_name(number), claim))
    work = claims.claim(catalog, "7", manifest(files, paths_of="40"))
    if refused:
        with pytest.raises(CheckpointUnfit, match=refused):
            asyncio.run(work)
    else:
        asyncio.run(work)
    assert claimed(catalog, "40") == ["41", "43"] + ([] if refused else ["7"])
    if not refused:  # an agent that died in between does it once more
        asyncio.run(claims.claim(catalog, "7", manifest(files, paths_of="40")))
        assert claimed(catalog, "40") == ["41", "43", "7"]


def claimed(catalog: Catalog, first: str) -> list[str]:
    return [claim["job"] for claim in asyncio.run(claims.all_of(catalog, first))]


@pytest.mark.parametrize("files", [{0: ["/x"]}, {}], ids=["a file is open", "none is open"])
def test_two_at_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, files: dict[int, list[str]]) -> None:
    """Both have looked before either has written: with the same files open only one may begin."""

    async def case() -> list[BaseException | None]:
        both, looked = asyncio.Barrier(2), set[str]()

        async def is_live(job: str) -> bool:
            return job in ("7", "8")

        note_new = catalog.note_new

        async def after_both(first: str, name: str, value: dict[str, Any]) -> bool:
            if value["job"] not in looked:
                looked.add(value["job"])
                await both.wait()
            return await note_new(first, name, value)

        monkeypatch.setattr(claims, "is_live", is_live)
        monkeypatch.setattr(catalog, "note_new", after_both)
        work = (claims.claim(catalog, job, manifest(files)) for job in ("7", "8"))
        return await asyncio.gather(*work, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(case(), 10))
    refused = [str(result) for result in results if result is not None]
    if files:
        (winner,) = claimed(catalog, "41")
        assert [f"job {winner} is not over and writes to /x, too" in text for text in refused] == [True]
    else:
        assert (refused, sorted(claimed(catalog, "41"))) == ([], ["7", "8"])


def test_a_claim_that_cannot_be_read(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who made it is not known: waited for, then refused with its name."""

    async def is_live(_job: str) -> bool:
        return False

    monkeypatch.setattr(claims, "is_live", is_live)
    monkeypatch.setattr(claims, "_HALF_PAUSE_S", 0)
    asyncio.run(catalog._worker.call("record", job="41", name="clone-0", data=""))
    with pytest.raises(CheckpointUnfit, match="record clone-0 of job 41 in the store cannot be read"):
        asyncio.run(claims.claim(catalog, "7", manifest({0: ["/x"]})))


def script_path(monkeypatch: pytest.MonkeyPatch, spool: str | None, *command: str) -> str:
    """What path_of makes of a supervisor with this command line."""

    async def config() -> dict[str, str]:
        if spool is None:
            raise SlurmError(reason="down")
        return {"slurmdspooldir": spool}

    monkeypatch.setattr(batchscript.slurm, "config", config)
    wait = [sys.executable, "-c", "print(flush=True); input()", *command]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return asyncio.run(batchscript.path_of(process.pid, "n1"))


def test_the_script_is_slurmds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path elsewhere, which a user could name, is none."""
    good = "/var/spool/slurmd/job00041/slurm_script"
    assert good == script_path(monkeypatch, "/var/spool/slurmd", "--job", "41", "--", good, "word")
    named = "/var/spool/n1/job00041/slurm_script"
    assert named == script_path(monkeypatch, "/var/spool/%n", "--", named)
    for bad in ("/etc/job00041/slurm_script", "/var/spool/slurmd/../job1/slurm_script", good + "x"):
        assert script_path(monkeypatch, "/var/spool/slurmd", "--", bad) == ""
    assert script_path(monkeypatch, None, "--", good) == ""
    assert script_path(monkeypatch, "/var/spool/slurmd", good) == ""


def test_reading_the_script(tmp_path: Path) -> None:
    """Content and mode of a regular file of the user; no link, no other file, nobody else's."""
    script = tmp_path / "slurm_script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    assert batchscript.read(script, os.getuid()) == (b"#!/bin/sh\n", 0o700)
    (tmp_path / "link").symlink_to(script)
    with pytest.raises(OSError):
        batchscript.read(tmp_path / "link", os.getuid())
    os.mkfifo(tmp_path / "pipe")
    assert batchscript.read(tmp_path / "pipe", os.getuid()) is None
    if os.getuid() == 0:
        os.chown(script, 1, 1)
        assert batchscript.read(script, 2) is None
