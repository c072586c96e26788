"""Checkpoints of every released format version stay readable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from make_sample import CHECKPOINT, JOB, LATER, sample_contents

from gpucr_hpc.image.keys import DataKey, PublicKey, SiteKey
from gpucr_hpc.image.manifest import decode
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.model import READABLE_VERSIONS
from gpucr_hpc.store.posix import PosixStore

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", READABLE_VERSIONS)
def test_sample_of_each_version_is_readable(version):
    """The checked-in sample gives exactly the content it was made of, references to an earlier checkpoint too."""
    root = HERE / f"sample-v{version}"
    site = SiteKey(bytes.fromhex((root / "TEST-ONLY-site.key").read_text().strip()))
    trusted = [PublicKey(bytes.fromhex((root / "TEST-ONLY-signing.pub").read_text().strip()))]
    store = PosixStore(root, create=False)
    found = [CHECKPOINT] if version == 1 else [CHECKPOINT, LATER]
    assert [(JOB, checkpoint) for checkpoint in found] == store.list()
    for checkpoint in found:
        data = store.read_manifest(JOB, checkpoint)
        manifest = decode(data, "sample", trusted, job=JOB, checkpoint=checkpoint)
        assert version == manifest.format
        assert [image.node_rank for image in manifest.images] == [0, 1]
        key = DataKey.unwrap(manifest.slots, [site], checkpoint)
        for image in manifest.images:
            assert ([CHECKPOINT] if checkpoint == LATER else []) == [s.checkpoint for s in image.sources]
            with ImageReader(opener(store, checkpoint), image, checkpoint=checkpoint, key=key) as reader:
                reader.verify(deep=True)
                content = {name: reader.read(name) for name in reader.names()}
            assert sample_contents(image.node_rank, checkpoint) == content


def opener(store: PosixStore, checkpoint: str) -> Callable[[str], BinaryIO]:
    return lambda name: store.open(JOB, checkpoint, name)
