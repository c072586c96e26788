"""The worker's choice between references and a full image."""

from __future__ import annotations

import socket

import pytest

from gpucr_hpc.engine import stream
from gpucr_hpc.engine.worker import Worker
from gpucr_hpc.image.keys import DataKey, SiteKey
from gpucr_hpc.model import ImageEntry

JOB, IDS = "41", ["20261127T232501Z-3f9a", "20261127T232502Z-3f9a"]


@pytest.fixture
def begin(tmp_path):
    """Begin and finish an image of some bytes; what do_capture said, and the entry."""
    workers = []

    def capture(number: int, key: DataKey, base: dict[str, object] | None = None) -> tuple[str | None, ImageEntry]:
        ours, theirs = socket.socketpair()
        worker = Worker(theirs)
        workers.append((worker, ours, theirs))
        worker.do_open(str(tmp_path / "store"), 0, 0, listen=str(tmp_path), name=stream.CAPTURE_SOCKET)
        said = worker.do_capture(JOB, IDS[number], 0, key.reveal_hex(), begin=True, packs=2, base=base)
        with worker._writer.stream("pages-1.img") as file:
            file.write(bytes(range(256)) * 40_000)
        entry = worker.do_seal()
        worker.do_publish("TQ==")
        return said, ImageEntry.from_dict(entry)

    yield capture
    for worker, ours, theirs in workers:
        worker.do_abort()
        ours.close()
        theirs.close()


def base_of(entry: ImageEntry, key: DataKey) -> dict[str, object]:
    return {"checkpoint": IDS[0], "entry": entry.as_dict(), "key": key.reveal_hex()}


def test_what_is_the_same_is_referred_to(begin):
    """With the last image as base nothing but the index is new."""
    ids = SiteKey(b"s" * 32).id_key(JOB)
    one, two = DataKey.generate(ids), DataKey.generate(ids)
    _, first = begin(0, one)
    said, second = begin(1, two, base_of(first, one))
    assert said is None
    assert [IDS[0]] == [source.checkpoint for source in second.sources]


@pytest.mark.parametrize("why", ["another site key", "gone", "damaged"])
def test_a_base_that_cannot_be_used_costs_space_and_no_checkpoint(begin, tmp_path, why):
    """After a change of the site key, or when the last image is damaged or gone, the image is written in full."""
    ids = SiteKey(b"s" * 32).id_key(JOB)
    one, two = DataKey.generate(ids), DataKey.generate(None if why == "another site key" else ids)
    _, first = begin(0, one)
    where = tmp_path / "store" / JOB / IDS[0]
    if why == "gone":
        (where / first.packs[1].name).unlink()
    if why == "damaged":
        (where / first.index.name).write_bytes(b"x" * first.index.size_bytes)
    said, second = begin(1, two, base_of(first, one))
    assert said
    assert [] == second.sources
    left = {path.name for path in (tmp_path / "store" / JOB / IDS[1]).iterdir()}
    assert {"manifest", *second.names()} == left
