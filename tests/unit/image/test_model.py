"""Ids and the manifest's own rules."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.errors import UsageError
from gpucr_hpc.model import (
    ImageEntry,
    Manifest,
    PackEntry,
    canonical_json,
    check_checkpoint_id,
    check_job_id,
    check_object_name,
    is_checkpoint_id,
    new_checkpoint_id,
    rfc3339,
)

PACK = PackEntry("p", 1, "0" * 64)
IMAGE = ImageEntry(0, "n1", "0" * 64, PackEntry("i", 2, "1" * 64), [PACK], 5, 3, 1)


def test_checkpoint_id_of_a_moment():
    """UTC to the second and the fraction in hex; datetimes and seconds give the same."""
    moment = datetime(2026, 11, 27, 23, 25, 1, 500_000, tzinfo=UTC)
    assert new_checkpoint_id(moment) == new_checkpoint_id(moment.timestamp()) == "20261127T232501Z-8000"
    assert rfc3339(moment) == "2026-11-27T23:25:01Z"
    assert is_checkpoint_id(new_checkpoint_id())


@given(a=st.floats(0, 4e9), b=st.floats(0, 4e9))
def test_checkpoint_ids_sort_by_time(a, b):
    """The order of ids as text is that of their times."""
    low, high = sorted((a, b))
    assert new_checkpoint_id(low) <= new_checkpoint_id(high)


@pytest.mark.parametrize("text", ["", "a", "1" * 21, "41 ", "٣", "-1"])
def test_bad_job_ids(text):
    """A job id is one to twenty ASCII digits."""
    with pytest.raises(UsageError):
        check_job_id(text)


def test_good_names():
    """Ids and names that Slurm and CRIU use are accepted as they are."""
    assert check_job_id("41") == "41"
    assert check_checkpoint_id("20261127T232501Z-3f9a") == "20261127T232501Z-3f9a"
    for name in ("pages-1.img", "fdinfo-2.img", "timens-0.img", "a" * 200):
        assert check_object_name(name) == name
    with pytest.raises(UsageError):
        check_checkpoint_id("20261127T232501Z-3F9A")


def test_names_of_files_that_are_no_utf8_are_kept():
    """As the kernel gives them: a job with such a file is checkpointed like others."""
    name = os.fsdecode(b"na\xefve \\ \xc3\xa4.txt")
    data = canonical_json({"path": name})
    assert os.fsencode(json.loads(data.decode())["path"]) == b"na\xefve \\ \xc3\xa4.txt"


def test_canonical_json():
    """Keys sorted, no spaces, UTF-8, no NaN."""
    assert canonical_json({"b": [1, 2], "a": "ä"}) == '{"a":"ä","b":[1,2]}'.encode()
    with pytest.raises(ValueError):
        canonical_json({"a": float("inf")})


def test_manifest_sums_and_looks_up():
    """The manifest adds its images up and finds one by node rank."""
    manifest = Manifest(
        checkpoint="20261127T232501Z-3f9a", job="41", uid=1, gid=2, reason="demand", run=0, images=[IMAGE], slots=[]
    )
    assert (manifest.bytes_plain, manifest.bytes_stored) == (5, 3)
    assert manifest.image(0) is IMAGE
    with pytest.raises(UsageError, match="node rank 1"):
        manifest.image(1)
    assert Manifest.from_dict(manifest.as_dict()) == manifest
    assert ImageEntry.from_dict(IMAGE.as_dict()) == IMAGE


def test_part_of_one_node():
    """It has that node's image and notes, the job's names, and nothing of other nodes."""
    images = [replace(IMAGE, node_rank=rank, packs=[], index=PackEntry(f"i{rank}", 2, "1" * 64)) for rank in range(3)]
    meta = {"names": ["a", "b", "c"], "ranks": [{"node": name} for name in ("n1", "n2", "n3")]}
    whole = Manifest(
        checkpoint="20261127T232501Z-8000", job="1", uid=1, gid=1, reason="demand", run=0,
        images=images, slots=[], meta=meta,
    )  # fmt: skip
    part = Manifest.from_dict(whole.of_node(1).as_dict())
    assert [images[1]] == part.images
    assert ({"node": "n2"}, [{"node": "n2"}]) == (part.rank(1), part.meta["ranks"])
    assert whole.meta["names"] == part.meta["names"]
    with pytest.raises(UsageError):
        part.rank(0)
