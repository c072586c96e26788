"""What only a real file system has: modes, links, order of writes, a full disk."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from gpucr_hpc.errors import CheckpointMissing, ObjectMissing, StoreError, StoreFull
from gpucr_hpc.store import posix
from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore

ID = "20261127T232501Z-3f9a"


@pytest.fixture
def store(tmp_path):
    return PosixStore(tmp_path / "store")


def published(store, data=b"data"):
    staging = store.begin("41", ID)
    with staging.create("a.pack") as file:
        file.write(data)
    staging.publish(b"M")


def test_modes(store, tmp_path):
    """Directories are 0700 and files 0600, whatever the umask."""
    old = os.umask(0)
    try:
        published(PosixStore(tmp_path / "open" / "store"))
        PosixStore(tmp_path / "open" / "store").put_record("41", "end", b"x")
    finally:
        os.umask(old)
    for path in (tmp_path / "open" / "store", *(tmp_path / "open" / "store").rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert wanted == stat.S_IMODE(path.stat().st_mode), path


def test_layout(store, tmp_path):
    """The names on disk are those of docs/format.md, and publish leaves no temporary file."""
    published(store)
    store.put_record("41", "end", b"x")
    root = tmp_path / "store"
    names = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    assert [f"41/{ID}/a.pack", f"41/{ID}/manifest", "41/record-end"] == names


def test_empty_job_directory_is_removed(store, tmp_path):
    """Nothing of a job stays when its last checkpoint and record are gone."""
    published(store)
    store.delete("41", ID)
    assert list((tmp_path / "store").iterdir()) == []
    store.put_record("41", "end", b"x")
    store.delete_record("41", "end")
    assert list((tmp_path / "store").iterdir()) == []


def test_publish_writes_in_order(store, monkeypatch):
    """Manifest synced, renamed, its directory synced, the directory renamed, the parent synced."""
    staging = store.begin("41", ID)
    events = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd):
        kind = "dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        events.append(f"fsync {kind}")
        fsync(fd)

    def spy_rename(src, dst, **kw):
        events.append(f"rename to {dst}")
        rename(src, dst, **kw)

    monkeypatch.setattr(posix.os, "fsync", spy_fsync)
    monkeypatch.setattr(posix.os, "rename", spy_rename)
    staging.publish(b"M")
    assert ["fsync file", "rename to manifest", "fsync dir", f"rename to {ID}", "fsync dir"] == events


@pytest.mark.parametrize("step", range(5))
def test_crash_in_publish_leaves_all_or_nothing(store, monkeypatch, step):
    """Whichever system call of publish is the last, the checkpoint is complete or not listed."""
    staging = store.begin("41", ID)
    calls = []

    def dies(real):
        def call(*args, **kw):
            if len(calls) == step:
                raise KeyboardInterrupt
            calls.append(real)
            return real(*args, **kw)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(posix.os, "fsync", dies(os.fsync))
        patch.setattr(posix.os, "rename", dies(os.rename))
        with pytest.raises(KeyboardInterrupt):
            staging.publish(b"M")
    complete = store.list() == [("41", ID)]
    assert complete == (step == 4)
    assert ([] if complete else ["41"]) == [orphan.job for orphan in store.orphans(0)]
    if not complete:
        staging.publish(b"M")
        assert store.read_manifest("41", ID) == b"M"


def test_half_deleted_is_never_listed(store, monkeypatch):
    """A deleter that dies leaves an orphan and no checkpoint."""
    published(store)

    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(posix, "remove_tree", dies)
        with pytest.raises(KeyboardInterrupt):
            store.delete("41", ID)
    assert store.list() == []
    (orphan,) = store.orphans(0)
    assert ".trash-" in orphan.name
    published(store)
    store.remove_orphan(orphan)
    assert store.orphans(0) == []
    assert store.list() == [("41", ID)]


def test_directory_without_manifest_is_not_a_checkpoint(store, tmp_path):
    """A directory that only looks like a checkpoint, and other litter, is not listed."""
    published(store)
    for litter in ("20261127T232502Z-3f9a", "x", "20261127T232503Z-3f9a.old"):
        (tmp_path / "store" / "41" / litter).mkdir()
    (tmp_path / "store" / "lost+found").mkdir()
    (tmp_path / "store" / "7").write_text("")
    assert [pair for pair in store.list("41")] == [("41", ID)]


def test_links_are_not_followed(store, tmp_path):
    """A symbolic link in place of a job, checkpoint, file or record is refused."""
    published(store)
    secret = tmp_path / "secret"
    secret.write_text("x")
    root = tmp_path / "store"
    (root / "41" / ID / "link").symlink_to(secret)
    (root / "41" / "record-link").symlink_to(secret)
    (root / "42").symlink_to(root / "41")
    with pytest.raises(StoreError):
        store.open("41", ID, "link")
    with pytest.raises(StoreError):
        store.get_record("41", "link")
    with pytest.raises(StoreError):
        store.read_manifest("42", ID)
    store.put_record("41", "link", b"new")
    assert secret.read_text() == "x"


def test_deleting_follows_no_link(store, tmp_path):
    """A link to a directory inside a checkpoint is removed, not what it points at."""
    published(store)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    (tmp_path / "store" / "41" / ID / "link").symlink_to(outside)
    store.delete("41", ID)
    assert (outside / "file").read_text() == "x"


def test_fifo_does_not_block(store, tmp_path):
    """A FIFO in place of a file is refused at once."""
    published(store)
    os.mkfifo(tmp_path / "store" / "41" / ID / "fifo")
    with pytest.raises(StoreError, match="not a regular file"):
        store.open("41", ID, "fifo")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreError), (errno.ESTALE, StoreError)],
)
def test_write_errors_name_the_path(store, monkeypatch, number, kind):
    """ENOSPC and EDQUOT are StoreFull, others StoreError; both name the file."""
    file = store.begin("41", ID).create("a.pack")

    def fails(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(posix.os, "write", fails)
        with pytest.raises(StoreError, match=r"a\.pack") as caught:
            file.write(b"x")
    assert kind is type(caught.value)
    file.close()


def test_full_disk_at_a_record_keeps_the_old_one(store, monkeypatch, tmp_path):
    """A record that could not be replaced is still the old one, with no temporary left."""
    store.put_record("41", "end", b"old")

    def fails(*args):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(posix.os, "fsync", fails)
        with pytest.raises(StoreFull):
            store.put_record("41", "end", b"new")
    assert store.get_record("41", "end") == b"old"
    assert os.listdir(tmp_path / "store" / "41") == ["record-end"]


def test_write_takes_everything(store):
    """write does not return before all is written, also for data that is no bytes object."""
    with store.begin("41", ID).create("a") as file:
        assert file.write(memoryview(bytearray(3 << 20))) == 3 << 20
    with store.attach("41", ID).open("a") as file:
        assert len(file.read()) == 3 << 20


def test_missing_root(tmp_path):
    """A store that is not mounted is an error, not an empty store."""
    store = PosixStore(tmp_path / "gone", create=False)
    with pytest.raises(StoreError, match="gone"):
        store.list()
    with pytest.raises(StoreError, match="gone"):
        store.begin("41", ID)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        PosixStore(tmp_path / "file")


def test_leftover_record_is_an_orphan(store, tmp_path):
    """A temporary record of a dead writer is found and removed."""
    store.put_record("41", "end", b"x")
    (tmp_path / "store" / "41" / "record-end.tmp-0011").write_text("half")
    (orphan,) = store.orphans(0)
    store.remove_orphan(orphan)
    assert store.get_record("41", "end") == b"x"


def test_age_of_an_orphan_is_that_of_its_newest_file(store, tmp_path):
    """A long write is no orphan while its packs grow."""
    store.begin("41", ID).create("a").close()
    directory = tmp_path / "store" / "41" / (ID + ".partial")
    os.utime(directory, (0, 0))
    assert store.orphans(3600) == []
    os.utime(directory / "a", (0, 0))
    assert len(store.orphans(3600)) == 1


def test_no_descriptor_leaks(store):
    """Every method gives back the descriptors it took, also when it fails."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    published(store)
    with pytest.raises(StoreError):
        store.begin("41", ID)
    with pytest.raises(ObjectMissing):
        store.open("41", ID, "x")
    with pytest.raises(CheckpointMissing):
        store.attach("41", ID)
    store.list()
    store.orphans(0)
    store.read_manifest("41", ID)
    store.delete("41", ID)
    assert before == count()


def test_memory_store_can_be_full():
    """The disk of a MemoryStore is as large as it was told, and deleting gives space back."""
    store = MemoryStore(capacity_bytes=10)
    staging = store.begin("41", ID)
    with staging.create("a") as file:
        file.write(b"123456789")
        with pytest.raises(StoreFull):
            file.write(b"xx")
    staging.publish(b"M")
    assert store.free_bytes() == 0
    with pytest.raises(StoreFull):
        store.put_record("41", "end", b"x")
    store.delete("41", ID)
    assert store.free_bytes() == 10


def test_new_record_without_hard_links(store, monkeypatch, tmp_path):
    """A file system that has none keeps one of two all the same."""

    def link(*_args: object, **_more: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    assert [True, False] == [store.add_record("41", "claim", data) for data in (b"one", b"two")]
    assert store.get_record("41", "claim") == b"one"
    assert os.listdir(tmp_path / "store" / "41") == ["record-claim"]


@pytest.mark.parametrize("moment", ["replace_file", "rename", "listdir"])
def test_who_publishes_and_who_aborts_never_share_a_checkpoint(store, monkeypatch, moment):
    """Agents of several nodes have one open; whatever one is at when the other comes, it is whole or not there."""
    staging = store.begin("41", ID)
    with staging.create("a.pack") as file:
        file.write(b"data")
    other = store.attach("41", ID)
    done = []

    def first(work, kept):
        def call(*args, **kwargs):
            if not done:
                done.append(None)
                try:
                    work()
                except StoreError as error:
                    done[0] = error
            return kept(*args, **kwargs)

        return call

    if moment == "replace_file":  # aborted when the manifest is about to be written
        monkeypatch.setattr(posix, "replace_file", first(other.abort, posix.replace_file))
        with pytest.raises(StoreError):
            staging.publish(b"M")
    elif moment == "rename":  # published, or not, when the other is about to take it away
        monkeypatch.setattr(posix.os, "rename", first(lambda: staging.publish(b"M"), os.rename))
        other.abort()
    else:  # what comes when its content is being removed
        monkeypatch.setattr("gpucr_hpc.store.files.os.listdir", first(lambda: staging.publish(b"M"), os.listdir))
        other.abort()
        assert isinstance(done[0], StoreError)
    monkeypatch.undo()
    assert done
    if store.list():
        assert moment == "rename"
        with store.open("41", ID, "a.pack") as file:
            assert file.read() == b"data"
    for orphan in store.orphans(0):
        store.remove_orphan(orphan)
    assert not list(store.orphans(0))


def test_a_file_that_comes_while_a_checkpoint_is_removed_leaves_an_orphan(store, monkeypatch):
    staging = store.begin("41", ID)
    with staging.create("a.pack") as file:
        listdir = os.listdir

        def late(fd):
            found = listdir(fd)
            if "a.pack" in found:
                os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            return found

        monkeypatch.setattr("gpucr_hpc.store.files.os.listdir", late)
        staging.abort()
        monkeypatch.undo()
        file.write(b"data")
    (orphan,) = store.orphans(0)
    store.remove_orphan(orphan)
    assert store.orphans(0) == []
