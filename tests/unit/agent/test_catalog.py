"""A job's checkpoints: which may be restored, which not and why."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc.agent import claims
from gpucr_hpc.agent.catalog import Catalog, Density
from gpucr_hpc.errors import IntegrityError, WrongKey
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.image.manifest import encode
from gpucr_hpc.model import ImageEntry, Manifest, PackEntry

JOB, UID = "41", 2001
SITE, SIGNING = SiteKey(b"s" * 32), SigningKey(b"i" * 32)
ENTRY = ImageEntry(0, "n1", "ab" * 32, PackEntry("r0000.index", 80, "0" * 64), [], 1000, 400, 1)
IDS = [f"20261127T2325{n:02d}Z-0000" for n in range(5)]


class Worker:
    """The store as a worker shows it, in memory."""

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.records: dict[tuple[str, str], str] = {}
        self.meta: dict[str, Any] = {"ranks": []}
        self.broken: set[tuple[str, str]] = set()
        self.looked_at: list[str] = []

    def add(self, checkpoint: str, *, job: str = JOB, uid: int = UID, key: SigningKey = SIGNING, at: str = "") -> None:
        manifest = Manifest(
            checkpoint=checkpoint, job=job, uid=uid, gid=100, reason="demand", run=0, images=[ENTRY],
            slots=[DataKey(b"d" * 32).wrap(SITE, checkpoint)], meta=self.meta,
        )  # fmt: skip
        self.manifests[job, at or checkpoint] = encode(manifest, key)

    async def call(self, verb: str, **fields: Any) -> Any:
        job, name = fields.get("job"), fields.get("name")
        match verb:
            case "manifests":
                return [
                    (owner, checkpoint, base64.b64encode(data).decode())
                    for (owner, checkpoint), data in sorted(self.manifests.items())
                    if job in (None, owner) and fields.get("checkpoint") in (None, checkpoint)
                ]
            case "verify":
                self.looked_at.append(fields["checkpoint"])
                if (job, fields["checkpoint"]) in self.broken:
                    raise IntegrityError(path="r0000-p00.pack", reason="test")
            case "delete":
                del self.manifests[job, fields["checkpoint"]]
            case "record" if fields.get("delete"):
                self.records.pop((job, name), None)
            case "record" if fields.get("new"):
                return self.records.setdefault((job, name), fields["data"]) is fields["data"]
            case "record" if "data" in fields:
                self.records[job, name] = fields["data"]
            case "record":
                return self.records.get((job, name))
            case _:
                raise AssertionError(verb)
        return None


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def catalog(worker):
    return Catalog(SimpleNamespace(trusted=[SIGNING.public], site_keys=(SITE,)), worker, "/store")


def candidates(catalog: Catalog) -> tuple[list[str], list[str]]:
    good, problems = asyncio.run(catalog.candidates(JOB, UID))
    return [manifest.checkpoint for manifest in good], problems


def test_newest_first(catalog, worker):
    for checkpoint in IDS[:3]:
        worker.add(checkpoint)
    worker.add(IDS[4], job="42")
    assert (IDS[2::-1], []) == candidates(catalog)


def test_nothing_yet(catalog):
    assert ([], []) == candidates(catalog)


def test_damaged_and_foreign_ones_are_left_out_and_named(catalog, worker):
    """Cut, altered, signed by a stranger, of another user, moved from another place: each with its file."""
    for checkpoint in IDS:
        worker.add(checkpoint)
    worker.manifests[JOB, IDS[0]] = worker.manifests[JOB, IDS[0]][:-1]
    worker.manifests[JOB, IDS[1]] = worker.manifests[JOB, IDS[1]].replace(b"demand", b"DEMAND")
    worker.add(IDS[2], key=SigningKey(b"x" * 32))
    worker.add(IDS[3], uid=UID + 1)
    good, problems = candidates(catalog)
    assert [IDS[4]] == good
    for checkpoint in IDS[:3]:
        assert any(f"/store/{JOB}/{checkpoint}/manifest" in problem for problem in problems), checkpoint
    assert f"checkpoint {IDS[3]} belongs to uid {UID + 1}, not {UID}" in problems
    worker.add(IDS[0], at=IDS[4])
    assert ([], True) == (candidates(catalog)[0], "another one lies in its place" in str(candidates(catalog)[1]))


def test_set_of_another_release(catalog, worker):
    """A set whose engine section this release cannot read is named, not tried."""
    worker.meta = {}
    worker.add(IDS[0])
    assert ([], [f"checkpoint {IDS[0]} was made by another release"]) == candidates(catalog)


def test_set_of_an_earlier_job_of_the_same_number(catalog, worker):
    """A cluster whose job counter began anew: what is older than the job's first run is not its own."""
    worker.add(IDS[0])
    asyncio.run(catalog.note_latest(JOB, IDS[0]))
    asyncio.run(catalog.first_run(JOB, after=IDS[1], excluded="n7"))
    assert ([], []) == candidates(catalog)
    worker.add(IDS[2])
    assert ([IDS[2]], []) == candidates(catalog)


def test_published_set_that_has_gone_is_missed(catalog, worker):
    """Without the newest set the job would silently lose work."""
    worker.add(IDS[0])
    worker.add(IDS[1])
    asyncio.run(catalog.note_latest(JOB, IDS[1]))
    assert ([IDS[1], IDS[0]], []) == candidates(catalog)
    del worker.manifests[JOB, IDS[1]]
    good, problems = candidates(catalog)
    assert ([IDS[0]], [f"no checkpoint {IDS[1]} in /store/{JOB}"]) == (good, problems)


def test_prune_keeps_the_last(catalog, worker):
    for checkpoint in IDS:
        worker.add(checkpoint)
    asyncio.run(catalog.prune(JOB, 2))
    assert [(JOB, IDS[3]), (JOB, IDS[4])] == sorted(worker.manifests)
    asyncio.run(catalog.prune(JOB, 0))
    assert [(JOB, IDS[4])] == sorted(worker.manifests), "one always stays"


def test_prune_counts_good_ones_only(catalog, worker):
    """A set that is damaged is not what the job could go on from: it does not push a good one out."""
    for checkpoint in IDS:
        worker.add(checkpoint)
    worker.broken.add((JOB, IDS[4]))
    worker.manifests[JOB, IDS[2]] = b"cut"
    assert [IDS[0]] == asyncio.run(catalog.prune(JOB, 2))
    assert [IDS[1], IDS[2]] == asyncio.run(catalog.prune(JOB, 1))
    worker.broken.add((JOB, IDS[3]))
    assert [] == asyncio.run(catalog.prune(JOB, 1)), "none is good, so none goes"


def test_prune_after_a_commit_opens_no_image_without_need(catalog, worker):
    """The new one was just written; as long as there are no more than are kept, none is looked at."""
    for checkpoint in IDS[:2]:
        worker.add(checkpoint)
    asyncio.run(catalog.prune(JOB, 2, fresh=IDS[1]))
    assert [] == worker.looked_at
    worker.add(IDS[2])
    asyncio.run(catalog.prune(JOB, 2, fresh=IDS[2]))
    assert [IDS[1]] == worker.looked_at
    assert [(JOB, IDS[1]), (JOB, IDS[2])] == sorted(worker.manifests)


def test_density_is_that_of_the_newest_good_one(catalog, worker):
    """What the estimate before a dump goes by; a hope, said to be one, as long as there is nothing."""
    assert Density(0.25, known=False) == asyncio.run(catalog.density(JOB, full=True))
    worker.add(IDS[0])
    worker.manifests[JOB, IDS[1]] = b"cut"
    for full in (True, False):
        assert Density(0.4, known=True) == asyncio.run(catalog.density(JOB, full=full))


def test_retire_removes_all(catalog, worker):
    worker.add(IDS[0])
    worker.add(IDS[1], job="42")
    asyncio.run(catalog.note_latest(JOB, IDS[0]))
    asyncio.run(catalog.retire(JOB))
    assert [("42", IDS[1])] == list(worker.manifests)
    assert ([], []) == candidates(catalog), "nothing is missed either"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Jobs that are not over."""
    found = {"50"}

    async def is_live(job: str) -> bool:
        return job in found

    monkeypatch.setattr(claims, "is_live", is_live)
    return found


def test_what_another_job_began_with_stays_until_it_has_its_own(catalog, worker, live):
    """Job 50 began with the first set of job 41, which then ends well."""
    for checkpoint in IDS[:3]:
        worker.add(checkpoint)
    manifest = asyncio.run(catalog.find(IDS[0], UID))
    asyncio.run(claims.claim(catalog, "50", manifest))
    assert [IDS[1]] == asyncio.run(catalog.prune(JOB, 1)), "the first would go, too"
    asyncio.run(catalog.retire(JOB))
    assert [(JOB, IDS[0])] == list(worker.manifests)
    asyncio.run(claims.release(catalog, JOB, "51"))
    assert [(JOB, IDS[0])] == list(worker.manifests), "another clone's word is not its own"
    worker.meta = {"ranks": [], "paths_of": JOB}
    worker.add(IDS[3], job="50")
    asyncio.run(catalog.prune("50", 2))
    assert [("50", IDS[3])] == list(worker.manifests)
    assert {name for job, name in worker.records if job == JOB} == {"clone-0"}


def test_what_another_job_began_with_goes_with_its_end(catalog, worker, live):
    """It ended well, too, and has never had a set of its own; what a third one needs stays."""
    for checkpoint in IDS[:2]:
        worker.add(checkpoint)
    for job, checkpoint in (("50", IDS[0]), ("51", IDS[1])):
        asyncio.run(claims.claim(catalog, job, asyncio.run(catalog.find(checkpoint, UID))))
    live.add("51")
    asyncio.run(catalog.retire(JOB))
    assert [(JOB, IDS[0]), (JOB, IDS[1])] == list(worker.manifests)
    asyncio.run(catalog.retire("50"))
    asyncio.run(claims.release(catalog, JOB, "50"))
    assert [(JOB, IDS[1])] == list(worker.manifests)
    live.clear()
    asyncio.run(claims.release(catalog, JOB, "51"))
    assert {} == worker.manifests
    asyncio.run(catalog.first_run(JOB, after=IDS[4], excluded=""))
    assert [] == asyncio.run(claims.all_of(catalog, JOB)), "a new job of that number begins clean"


def test_end_in_the_grace_time_counts_for_later_runs_only(catalog):
    asyncio.run(catalog.ended(JOB, run=1, status=256))
    assert [None, 256] == [asyncio.run(catalog.ended_before(JOB, run)) for run in (1, 2)]
    asyncio.run(catalog.first_run(JOB, after=IDS[0], excluded=""))
    assert None is asyncio.run(catalog.ended_before(JOB, 2)), "a new job of that number begins clean"


def test_unreadable_record_is_none(catalog, worker):
    for text in ("", "[1]", "{"):
        worker.records[JOB, "latest"] = text
        assert None is asyncio.run(catalog.record(JOB, "latest"))


def test_key_of_a_checkpoint(catalog, worker):
    worker.add(IDS[0])
    (manifest,), _ = asyncio.run(catalog.candidates(JOB, UID))
    assert (b"d" * 32).hex() == catalog.key_of(manifest)
    catalog._keys.site_keys = (SiteKey(b"o" * 32),)
    with pytest.raises(WrongKey):
        catalog.key_of(manifest)
