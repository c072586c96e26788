"""Files that a tree has open for writing, and their way back to the size that they had."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.engine.openfiles import OpenFile, grown, put_back, set_aside, writable_files


def test_files_open_for_writing(tmp_path):
    """Once per path; not what is only read, deleted, no regular file, or in a private directory."""
    paths = {name: tmp_path / name for name in ("written", "read", "deleted", "private/file")}
    (tmp_path / "private").mkdir()
    for path in paths.values():
        path.write_bytes(b"12345")
    files = [paths["written"].open("ab"), paths["written"].open("r+b"), paths["read"].open("rb")]
    files += [paths["deleted"].open("ab"), paths["private/file"].open("ab")]
    paths["deleted"].unlink()
    me = read_process(os.getpid())
    assert me is not None
    found = [f for f in writable_files([me], (str(tmp_path / "private"),)) if f.path.startswith(str(tmp_path))]
    for file in files:
        file.close()
    assert [(str(paths["written"]), 5)] == [(f.path, f.size_bytes) for f in found]
    assert found == [OpenFile(**f.as_dict()) for f in found]


def test_roll_back(tmp_path):
    """What grew is cut and its tail kept beside, the rest is left alone; and it can be undone."""
    larger, same, short = (tmp_path / name for name in ("grown", "same", "short"))
    larger.write_bytes(b"before" + b"after" * 1000)
    same.write_bytes(b"same")
    short.write_bytes(b"s")
    files = [OpenFile(str(path), 6, os.O_WRONLY) for path in (larger, short, tmp_path / "gone")]
    files.append(OpenFile(str(same), 4, os.O_WRONLY))
    assert [f"{larger} grew by 5000 bytes after the checkpoint"] == grown(files)
    changed = set_aside(files, "after-ID")
    assert [(str(larger), f"{larger}.after-ID", 5000)] == changed
    assert (b"before", b"after" * 1000) == (larger.read_bytes(), (tmp_path / "grown.after-ID").read_bytes())
    assert (b"same", b"s") == (same.read_bytes(), short.read_bytes())
    assert 0o600 == (tmp_path / "grown.after-ID").stat().st_mode & 0o777
    put_back(changed)
    assert b"before" + b"after" * 1000 == larger.read_bytes()
    assert not (tmp_path / "grown.after-ID").exists()
    assert [] == grown(files[1:])


def test_second_roll_back_keeps_both_tails(tmp_path):
    path = tmp_path / "out"
    for tail in (b"one", b"two"):
        path.write_bytes(b"base" + tail)
        set_aside([OpenFile(str(path), 4, os.O_WRONLY)], "after-ID")
    assert (b"one", b"two") == tuple((tmp_path / f"out.after-ID{n}").read_bytes() for n in ("", ".1"))


def test_link_in_place_of_a_file_is_not_followed(tmp_path):
    """A user must not have another file cut."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "out").symlink_to(target)
    with pytest.raises(OSError, match="out"):
        set_aside([OpenFile(str(tmp_path / "out"), 1, os.O_WRONLY)], "after-ID")
    assert b"precious" == target.read_bytes()


def test_a_file_that_did_not_change_may_be_closed_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the target of a `cp` of a read-only file is while it is written: nothing is opened."""
    path = tmp_path / "copy"
    path.write_text("four")

    def refuse(name: str, *_: object) -> int:
        raise PermissionError(errno.EACCES, "no", name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert set_aside([OpenFile(str(path), 4, os.O_WRONLY)], "after-ID") == []


def test_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota is used up at the second of two files: the first is as it was, no tail stays, the file is named."""
    files = []
    for name in ("a", "b"):
        (tmp_path / name).write_text("before, after")
        files.append(OpenFile(str(tmp_path / name), 6, os.O_WRONLY))
    sync, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EDQUOT, "quota")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="quota") as caught:
        set_aside(files, "after-ID")
    assert caught.value.filename == str(tmp_path / "b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("ab", "before, after")


def test_putting_back_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a tail leaves no piece of it in the file."""
    files = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"head" + name.encode() * (3 << 20))
        files.append(OpenFile(str(tmp_path / name), 4, os.O_WRONLY))
    changed = set_aside(files, "after-ID")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limit[1]))
    try:
        with pytest.raises(OSError) as caught:
            put_back(changed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"head"
    put_back(changed)
    put_back(changed)
    for name in ("a", "b"):
        assert (tmp_path / name).read_bytes() == b"head" + name.encode() * (3 << 20)
