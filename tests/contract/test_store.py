"""One suite for every store; see gpucr_hpc/store/base.py for the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from gpucr_hpc.errors import CheckpointMissing, ObjectMissing, StoreError, UsageError
from gpucr_hpc.store.base import MAX_RECORD_BYTES, Orphan
from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore

OLD, NEW = "20261127T232501Z-3f9a", "20261128T000000Z-0001"


@pytest.fixture(params=["posix", "memory"])
def store(request, tmp_path):
    return PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore()


def publish(store, job="41", checkpoint=OLD, files=(("a.pack", b"data"),), manifest=b"M"):
    staging = store.begin(job, checkpoint)
    for name, data in files:
        with staging.create(name) as file:
            file.write(data)
    staging.publish(manifest)
    return staging


def test_published_checkpoint_is_listed_and_readable(store):
    """After publish the manifest and the files are there."""
    publish(store)
    assert [("41", OLD)] == store.list("41") == store.list()
    assert store.read_manifest("41", OLD) == b"M"
    with store.open("41", OLD, "a.pack") as file:
        assert file.read() == b"data"
        file.seek(2)
        assert file.read(10) == b"ta"


def test_unpublished_checkpoint_is_invisible(store):
    """Before publish nothing is listed or readable, from any process's view."""
    staging = store.begin("41", OLD)
    staging.create("a.pack").close()
    assert [] == store.list() == store.list("41") == store.list("7")
    with pytest.raises(CheckpointMissing, match=OLD):
        store.read_manifest("41", OLD)
    with pytest.raises(ObjectMissing):
        store.open("41", OLD, "a.pack")


def test_list_is_sorted_oldest_first(store):
    """Oldest first, over all jobs, whatever the order of writing."""
    publish(store, "41", NEW)
    publish(store, "9", OLD)
    publish(store, "41", OLD)
    assert store.list() == [("9", OLD), ("41", OLD), ("41", NEW)]
    assert store.list("41") == [("41", OLD), ("41", NEW)]


def test_second_begin_is_refused(store):
    """Neither a staging nor a checkpoint is begun again."""
    staging = store.begin("41", OLD)
    with pytest.raises(StoreError):
        store.begin("41", OLD)
    staging.publish(b"M")
    with pytest.raises(StoreError, match="there already"):
        store.begin("41", OLD)
    assert store.read_manifest("41", OLD) == b"M"


def test_name_is_created_once(store):
    """A second file of one name is refused and leaves the first."""
    staging = store.begin("41", OLD)
    with staging.create("a.pack") as file:
        file.write(b"first")
    with pytest.raises(StoreError):
        staging.create("a.pack")
    with staging.open("a.pack") as file:
        assert file.read() == b"first"


def test_links_outlive_the_checkpoint_they_come_from(store):
    """A linked file stays when its first checkpoint is deleted, and its space is free when the last one is."""
    free = store.free_bytes()
    publish(store, files=(("a.pack", b"d" * 4096), ("b.pack", b"e" * 4096)))
    staging = store.begin("41", NEW)
    staging.link(OLD, "a.pack", "old.a.pack")
    staging.link(OLD, "b.pack", "old.b.pack")
    with pytest.raises(StoreError):
        staging.link(OLD, "a.pack", "old.a.pack")
    with pytest.raises(ObjectMissing):
        staging.link(OLD, "c.pack", "c.pack")
    staging.remove("old.b.pack")
    with pytest.raises(ObjectMissing):
        staging.remove("old.b.pack")
    staging.publish(b"N")
    store.delete("41", OLD)
    with store.open("41", NEW, "old.a.pack") as file:
        assert b"d" * 4096 == file.read()
    with pytest.raises(ObjectMissing):
        store.open("41", NEW, "old.b.pack")
    store.delete("41", NEW)
    if isinstance(store, MemoryStore):
        assert free == store.free_bytes()


def test_attached_writers_share_a_staging(store):
    """Several writers put their files into one staging; one publishes them all."""
    staging = store.begin("41", OLD)
    with store.attach("41", OLD).create("r0001-p00.pack") as file:
        file.write(b"from another node")
    staging.publish(b"M")
    with store.open("41", OLD, "r0001-p00.pack") as file:
        assert file.read() == b"from another node"


def test_attach_without_begin(store):
    """There is nothing to attach to before begin and after publish."""
    with pytest.raises(CheckpointMissing):
        store.attach("41", OLD)
    publish(store)
    with pytest.raises(CheckpointMissing):
        store.attach("41", OLD)


def test_abort_removes_everything_and_may_be_repeated(store):
    """After abort the same checkpoint can be begun again; abort after publish changes nothing."""
    staging = store.begin("41", OLD)
    staging.create("a.pack").close()
    staging.abort()
    staging.abort()
    assert store.orphans(0) == []
    with pytest.raises(ObjectMissing):
        staging.create("b.pack")
    with pytest.raises(ObjectMissing):
        staging.publish(b"M")
    publish(store).abort()
    assert store.list() == [("41", OLD)]


def test_delete(store):
    """A deleted checkpoint is gone, the others stay, and a second delete says so."""
    publish(store, checkpoint=OLD)
    publish(store, checkpoint=NEW)
    store.delete("41", OLD)
    assert store.list() == [("41", NEW)]
    with pytest.raises(CheckpointMissing, match=OLD):
        store.delete("41", OLD)
    store.delete("41", NEW)
    with pytest.raises(CheckpointMissing):
        store.delete("41", NEW)
    publish(store, checkpoint=NEW)
    assert store.orphans(0) == []


def test_replace_manifest(store):
    """The new one is read from then on; one that somebody else changed meanwhile stays, and so do the files."""
    publish(store)
    store.replace_manifest("41", OLD, b"M", b"other")
    assert b"other" == store.read_manifest("41", OLD)
    with pytest.raises(StoreError, match="meanwhile"):
        store.replace_manifest("41", OLD, b"M", b"third")
    assert b"other" == store.read_manifest("41", OLD)
    with store.open("41", OLD, "a.pack") as file:
        assert b"data" == file.read()
    with pytest.raises(CheckpointMissing):
        store.replace_manifest("41", NEW, b"M", b"N")
    assert [("41", OLD)] == store.list()


def test_orphans(store):
    """A staging whose writer died is an orphan after its time, and can be removed, twice."""
    publish(store, checkpoint=NEW)
    store.begin("41", OLD).create("a.pack").close()
    assert store.orphans(3600) == []
    (orphan,) = store.orphans(0)
    assert [each.name for each in store.orphans(0, orphan.job)] == [orphan.name]
    assert store.orphans(0, str(int(orphan.job) + 1)) == []
    assert orphan.job == "41"
    assert OLD in orphan.name
    assert 0 <= orphan.age_s < 60
    store.remove_orphan(orphan)
    store.remove_orphan(orphan)
    assert store.orphans(0) == []
    assert store.list() == [("41", NEW)]


@pytest.mark.parametrize("name", [OLD, "record-x", "..", "../41", "x.partial"])
def test_only_orphans_are_removed_as_orphans(store, name):
    """A checkpoint or a record is not removed by remove_orphan."""
    publish(store, checkpoint=OLD)
    with pytest.raises(UsageError):
        store.remove_orphan(Orphan("41", name, 9.0))
    assert store.list() == [("41", OLD)]


def test_records(store):
    """A record is replaced as a whole, belongs to its job, and its removal may be repeated."""
    assert store.get_record("41", "end") is None
    store.put_record("41", "end", b"one")
    store.put_record("41", "end", b"")
    store.put_record("41", "other", b"two")
    assert store.get_record("41", "end") == b""
    assert store.get_record("41", "other") == b"two"
    assert store.get_record("42", "end") is None
    assert [] == store.list() == store.orphans(0)
    store.delete_record("41", "end")
    store.delete_record("41", "end")
    store.delete_record("42", "end")
    assert store.get_record("41", "end") is None
    with pytest.raises(UsageError):
        store.put_record("41", "end", bytes(MAX_RECORD_BYTES + 1))


def test_record_that_is_new(store):
    """What is there stays; of several that come at once one is kept, whole."""
    assert store.add_record("41", "claim", b"one")
    assert not store.add_record("41", "claim", b"two")
    assert store.get_record("41", "claim") == b"one"
    store.delete_record("41", "claim")
    assert store.add_record("41", "claim", b"three")
    with pytest.raises(UsageError, match="more than"):
        store.add_record("41", "large", bytes(MAX_RECORD_BYTES + 1))
    kept: list[tuple[str, bytes]] = []

    def work(number: int) -> None:
        for name in map(str, range(20)):
            data = b"%d" % number
            if store.add_record("41", name, data):
                kept.append((name, data))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in kept) == sorted(map(str, range(20)))
    assert all(store.get_record("41", name) == data for name, data in kept)
    assert store.orphans(0) == []


def test_records_outlive_checkpoints(store):
    """Deleting a job's last checkpoint leaves its records."""
    publish(store)
    store.put_record("41", "end", b"x")
    store.delete("41", OLD)
    assert store.get_record("41", "end") == b"x"


@pytest.mark.parametrize("job", ["", "41/..", "..", "-1", "4 1", "x", "٤١", "1" * 21, "41\n"])
def test_bad_job_is_refused(store, job):
    """A job is digits only, in every method."""
    calls = [
        lambda: store.begin(job, OLD),
        lambda: store.attach(job, OLD),
        lambda: store.list(job),
        lambda: store.open(job, OLD, "a"),
        lambda: store.read_manifest(job, OLD),
        lambda: store.delete(job, OLD),
        lambda: store.put_record(job, "a", b""),
        lambda: store.add_record(job, "a", b""),
        lambda: store.get_record(job, "a"),
        lambda: store.delete_record(job, "a"),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize("checkpoint", ["", "..", "latest", OLD + "/..", OLD + ".partial", OLD + "\n"])
def test_bad_checkpoint_is_refused(store, checkpoint):
    """A checkpoint id has one form."""
    for call in (store.begin, store.attach, store.read_manifest, store.delete):
        with pytest.raises(UsageError):
            call("41", checkpoint)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc/passwd", "a b", "a\0", "ä", "x" * 201])
def test_bad_name_is_refused(store, name):
    """Names of files and records cannot leave their directory."""
    staging = store.begin("41", OLD)
    calls = [
        lambda: staging.create(name),
        lambda: staging.open(name),
        lambda: store.open("41", OLD, name),
        lambda: store.put_record("41", name, b""),
        lambda: store.add_record("41", name, b""),
        lambda: store.get_record("41", name),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


def test_free_bytes(store):
    """Free space is a positive number of bytes."""
    assert store.free_bytes() > 0
    assert isinstance(store.location, str)


def test_begin_and_delete_at_once(store):
    """A checkpoint begun while the last other one of the job is deleted is not lost."""
    failures = []

    def work(number: int) -> None:
        try:
            for second in range(20):
                checkpoint = f"20261127T2325{second:02d}Z-{number:04x}"
                publish(store, checkpoint=checkpoint)
                store.delete("41", checkpoint)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.list() == []


def test_staging_across_processes(tmp_path):
    """Another process attaches by job and checkpoint; what it wrote is published."""
    store = PosixStore(tmp_path)
    staging = store.begin("41", OLD)
    code = (
        "import sys; from gpucr_hpc.store.posix import PosixStore\n"
        "with PosixStore(sys.argv[1]).attach('41', sys.argv[2]).create('b') as file: file.write(b'x')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path), OLD], check=True, env=env)
    staging.publish(b"M")
    with store.open("41", OLD, "b") as file:
        assert file.read() == b"x"
