"""The worker and its keys: when an earlier image may be referred to, and the files of users that it reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_sample import IDS, JOB, Site

from gpucr_hpc.engine import stream
from gpucr_hpc.engine.worker import Worker
from gpucr_hpc.engine.worker_files import read_own
from gpucr_hpc.errors import KeyFileError
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.store.posix import PosixStore


@pytest.fixture
def worker(site: Site) -> Iterator[Worker]:
    with socket.socket() as control:
        found = Worker(control)
        found._store = PosixStore(site.store.location)
        with stream.listen(site.root, "s") as found._listener:
            yield found
            found.do_abort()


def base(site: Site) -> dict:
    entry = site.manifest(IDS[0]).images[0].as_dict()
    return {"checkpoint": IDS[0], "entry": entry, "key": site.keys[IDS[0]].reveal_hex()}


def test_last_image_is_referred_to(site, worker):
    site.add(IDS[0])
    key = DataKey.generate(site.keys[IDS[0]]._ids)
    assert worker.do_capture(JOB, IDS[1], 0, key.reveal_hex(), True, packs=1, base=base(site)) is None


def test_after_a_rotation_the_image_is_written_in_full(site, worker):
    """Its ids are under another key: that is said, and the checkpoint is taken."""
    site.add(IDS[0])
    problem = worker.do_capture(JOB, IDS[1], 0, DataKey.generate().reveal_hex(), True, packs=1, base=base(site))
    assert "another site key" in problem
    assert worker._writer is not None
    assert ["r0000-p00.pack"] == [p.name for p in Path(site.store.location, JOB, f"{IDS[1]}.partial").iterdir()]


def test_file_of_a_user(tmp_path, worker):
    """Regular, his, writable for him alone, not too large; a FIFO does not block and a missing file is none."""
    path = tmp_path / "recipients.pem"
    path.write_bytes(b"text")
    assert b"text" == read_own(str(path), 100)
    with pytest.raises(KeyFileError, match="more than 3"):
        read_own(str(path), 3)
    path.chmod(0o664)
    with pytest.raises(KeyFileError, match="only he may write"):
        read_own(str(path), 100)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    for name in ("fifo", "dir"):
        with pytest.raises(KeyFileError):
            read_own(str(tmp_path / name), 100)
    assert worker.do_read(str(tmp_path / "missing"), 100) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user(tmp_path):
    """A link to somebody else's file gives nothing."""
    path = tmp_path / "x"
    path.write_bytes(b"text")
    os.chown(path, 2001, 2001)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(KeyFileError):
        read_own(str(tmp_path / "link"), 100)
