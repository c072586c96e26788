"""Checkpoints of every released format version stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_sample import CHECKPOINT, JOB, sample_contents

from gpucr_hpc.image.keys import DataKey, PublicKey, SiteKey
from gpucr_hpc.image.manifest import decode
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.store.posix import PosixStore

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", [1])
def test_sample_of_each_version_is_readable(version):
    """The checked-in sample gives exactly the content it was made of."""
    root = HERE / f"sample-v{version}"
    site = SiteKey(bytes.fromhex((root / "TEST-ONLY-site.key").read_text().strip()))
    trusted = [PublicKey(bytes.fromhex((root / "TEST-ONLY-signing.pub").read_text().strip()))]
    store = PosixStore(root, create=False)
    assert store.list() == [(JOB, CHECKPOINT)]
    data = store.read_manifest(JOB, CHECKPOINT)
    manifest = decode(data, "sample", trusted, job=JOB, checkpoint=CHECKPOINT)
    assert version == manifest.format
    assert [image.node_rank for image in manifest.images] == [0, 1]
    key = DataKey.unwrap(manifest.slots, [site], CHECKPOINT)
    for image in manifest.images:
        with ImageReader(
            lambda name: store.open(JOB, CHECKPOINT, name), image, checkpoint=CHECKPOINT, key=key
        ) as reader:
            reader.verify(deep=True)
            assert sample_contents(image.node_rank) == {name: reader.read(name) for name in reader.names()}
