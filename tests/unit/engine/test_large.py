"""Whether memory is read beside CRIU."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpucr_hpc.engine import large

MIB = 1 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.fixture(autouse=True)
def able(monkeypatch, tmp_path):
    """A machine with processors, a plugin and a kernel; some megabytes are much."""
    (tmp_path / "plugin.so").touch()
    monkeypatch.setattr(large, "PLUGIN", tmp_path / "plugin.so")
    monkeypatch.setattr(large, "PROCESSORS", 1)
    monkeypatch.setattr(large, "kernel_names_pages", lambda: True)
    monkeypatch.setattr(large, "LARGE_BYTES", 1 << 30)


def filled(mib: float, flags: int = PRIVATE) -> mmap.mmap:
    memory = mmap.mmap(-1, int(mib * MIB), flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    return memory


@pytest.mark.parametrize(
    ("mib", "flags", "grown"), [(24, PRIVATE, 24), (24, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, 0), (0.25, PRIVATE, 0)]
)
def test_private_anonymous_memory_is_counted(mib, flags, grown):
    """Shared memory and small mappings are CRIU's."""
    before = large.measure([os.getpid()])
    memory = filled(mib, flags)
    after = large.measure([os.getpid()])
    assert abs(after.large - before.large - grown * MIB) < MIB
    assert after.rest - before.rest < MIB
    memory.close()


def test_memory_of_a_file_that_was_changed_is_the_rest(tmp_path):
    """It is private, too, but only CRIU knows what of it belongs to the file."""
    path: Path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    before = large.measure([os.getpid()])
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 8 * MIB, flags=mmap.MAP_PRIVATE)
    memory[:] = b"x" * len(memory)
    after = large.measure([os.getpid()])
    assert abs(after.rest - before.rest - 8 * MIB) < MIB
    memory.close()


_GROWING = """
import mmap, sys
print("small", flush=True)
sys.stdin.readline()
memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
print("large", flush=True)
sys.stdin.readline()
"""


@contextmanager
def growing() -> Iterator[tuple[int, Callable[[], None]]]:
    """A process of its own, since this one has what other tests have left; and what makes it larger by 256 MiB."""
    with subprocess.Popen(
        [sys.executable, "-c", _GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "small\n"

        def grow() -> None:
            print(file=child.stdin, flush=True)
            assert child.stdout.readline() == "large\n"

        yield child.pid, grow
        child.kill()


def test_wanted_with_enough_of_it(monkeypatch):
    """And only then; a process that is gone has nothing."""
    with growing() as (pid, grow):
        grow()
        assert not large.wanted([pid])
        monkeypatch.setattr(large, "LARGE_BYTES", 256 * MIB)
        assert large.wanted([1 << 22, pid])
        assert not large.wanted([1 << 22])


def test_what_is_not_large_need_not_be_measured_again(monkeypatch):
    """Of memory that was added since all is large."""
    with growing() as (pid, grow):
        rest = large.measure([pid]).rest
        grow()
        monkeypatch.setattr(large, "LARGE_BYTES", 256 * MIB)
        monkeypatch.setattr(large, "measure", None)
        assert large.wanted([pid], rest)
        assert not large.wanted([pid], large.REST_BYTES)


def test_criu_loads_the_plugin_and_those_that_it_always_has(tmp_path):
    """No other, also where an earlier dump has left a folder."""
    (tmp_path / "libdir").mkdir()
    (tmp_path / "libdir/always.so").symlink_to("/usr/lib/gpucr/always.so")
    for _ in range(2):
        folder = large.plugin_folder(tmp_path)
        assert sorted(found.name for found in folder.iterdir()) == ["always.so", "plugin.so"]
        assert (folder / "always.so").readlink() == Path("/usr/lib/gpucr/always.so")
        assert (folder / "plugin.so").readlink() == large.PLUGIN
        (folder / "other.so").touch()


def test_little_may_be_left_to_criu():
    """It waits in the worker's memory."""
    much = 64 * large.REST_BYTES
    assert large.Memory(large.LARGE_BYTES, large.LARGE_BYTES // 4).is_worth_it
    assert not large.Memory(large.LARGE_BYTES, large.LARGE_BYTES // 4 + 1).is_worth_it
    assert not large.Memory(large.LARGE_BYTES - 1, 0).is_worth_it
    assert large.Memory(much, large.REST_BYTES).is_worth_it
    assert not large.Memory(much, large.REST_BYTES + 1).is_worth_it


@pytest.mark.parametrize("lacking", ["processors", "plugin", "kernel", "room for the rest"])
def test_not_wanted_where_it_cannot_be_or_does_not_pay(monkeypatch, lacking):
    memory = filled(256)
    monkeypatch.setattr(large, "LARGE_BYTES", 256 * MIB)
    if lacking == "processors":
        monkeypatch.setattr(large, "PROCESSORS", 1 << 20)
    elif lacking == "plugin":
        large.PLUGIN.unlink()
    elif lacking == "kernel":
        monkeypatch.setattr(large, "kernel_names_pages", lambda: False)
    else:
        monkeypatch.setattr(large, "REST_BYTES", 0)
    assert not large.wanted([os.getpid()])
    memory.close()
