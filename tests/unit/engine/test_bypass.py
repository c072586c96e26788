"""Large memory that CRIU is not shown: the image is what it would have written by itself."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from criu_tree import PAGE, Mapping, Process, files_of, runs_of
from fake_criu import FakeCriu
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr_hpc.engine import bypass, pagemap, protobuf, stream
from gpucr_hpc.errors import GpucrError, ImageError, MemoryUnreadable
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStaging, MemoryStore

JOB, ID, KEY = "41", "20261128T232501Z-3f9a", DataKey(b"k" * 32, b"i" * 32)
LIMIT_S = 10.0
AT = 1 << 30


@pytest.fixture(autouse=True)
def peer(monkeypatch):
    """CRIU is root; here it is us."""
    monkeypatch.setattr(stream._Connection, "peer_uid", os.getuid())
    monkeypatch.setattr(bypass.Bypass, "peer_uid", os.getuid())


class Plugin:
    """CRIU's plugin, as spank_plugin/criu_memory.c speaks."""

    def __init__(self, directory: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(str(directory / bypass.SOCKET))

    def ready(self) -> None:
        self.sock.send(struct.pack("=II", 0, 0))

    def name(self, pid: int, ranges: Sequence[tuple[int, int]], memory: int | None) -> None:
        packet = struct.pack("=II", pid, len(ranges)) + b"".join(struct.pack("=QQ", *one) for one in ranges)
        socket.send_fds(self.sock, [packet], [] if memory is None else [memory])


@dataclass
class Dump:
    """A dump under way."""

    directory: Path
    capture: stream.Capture
    memory: bypass.Bypass
    writer: ImageWriter
    staging: MemoryStaging
    plugins: list[Plugin] = field(default_factory=list)

    def plugin(self) -> Plugin:
        """One that is connected."""
        self.plugins.append(Plugin(self.directory))
        return self.plugins[-1]

    def finish(self) -> dict[str, bytes]:
        """The files of the image."""
        self.capture.drain(LIMIT_S)
        entry = self.writer.finish()
        with ImageReader(self.staging.open, entry, checkpoint=ID, key=KEY) as reader:
            return {name: reader.read(name) for name in reader.names() if name != "inventory.img"}


@contextmanager
def dumping(*, slow: bool = False) -> Iterator[Dump]:
    """slow: the thread that hears the plugin does not get to it."""
    with tempfile.TemporaryDirectory(prefix="gpucr-") as name:
        directory = Path(name)
        staging = MemoryStore().begin(JOB, ID)
        writer = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY, workers=3)
        memory = bypass.Bypass(directory)
        if not slow:
            memory.start()
        capture = stream.Capture(stream.listen(directory, stream.CAPTURE_SOCKET), writer, memory)
        capture.start()
        dump = Dump(directory, capture, memory, writer, staging)
        try:
            yield dump
        finally:
            for plugin in dump.plugins:
                plugin.sock.close()
            capture.abort()
            capture._thread.join(LIMIT_S)
            with capture._changed:
                assert capture._changed.wait_for(lambda: not capture._open, LIMIT_S)
            writer.abort()
            memory.close()


def order(files: dict[str, bytes]) -> dict[str, bytes]:
    """As CRIU opens them: the pages of a process right after its pagemap."""
    pagemaps = sorted(name for name in files if name.startswith("pagemap-"))
    said = {name: data for name, data in files.items() if not name.startswith("pages-") and name not in pagemaps}
    for name in pagemaps:
        pages = f"pages-{pagemap.parse(files[name]).pages_id}.img"
        said |= {name: files[name], pages: files[pages]}
    return said


def split(process: Process, large: Sequence[int]) -> tuple[Process, dict[int, bytes]]:
    """What CRIU has of a process that is not shown some of its mappings, by number, and the pages of these."""
    shown = [m if n not in large else Mapping(m.start, m.pages, {}) for n, m in enumerate(process.mappings)]
    hidden = Process(process.pid, process.parent, [process.mappings[n] for n in large]).memory()
    return Process(process.pid, process.parent, shown), hidden


def memory_of(pages: dict[int, bytes]) -> int:
    """A file that reads like /proc/PID/mem: pages at their addresses."""
    file = os.memfd_create("mem")
    for address, data in pages.items():
        os.pwrite(file, data, address)
    return file


def as_lazy(data: bytes) -> list[tuple[int, int]]:
    """Pages of a pagemap in its order, by runs."""
    mapped = pagemap.parse(data)
    return runs_of([at + n * PAGE for at, pages in mapped.runs for n in range(pages)])


@st.composite
def trees(draw):
    """Processes with up to seven mappings, of which some are hidden; pages are missing here and there."""
    processes, hidden, rng = [], [], random.Random(draw(st.integers(0, 1 << 16)))
    for number in range(draw(st.integers(1, 3))):
        mappings, at = [], AT + number * PAGE
        for pages in draw(st.lists(st.sampled_from([1, 5, 40, 300, 600]), min_size=1, max_size=7)):
            there = sorted(rng.sample(range(pages), rng.randint(0, pages))) if rng.random() < 0.5 else range(pages)
            mappings.append(Mapping(at, pages, {n: rng.randbytes(PAGE) for n in there}))
            at += (pages + rng.choice([0, 1, 900])) * PAGE
        processes.append(Process(2 + number, 1, mappings))
        hidden.append(sorted(rng.sample(range(len(mappings)), rng.randint(0, len(mappings)))))
    return processes, hidden


@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_image_is_that_of_criu_alone(tree, most, more, rng):
    """Whatever is hidden: pages, their places and their order are those of a CRIU that was shown everything. Also where
    some pages are named more than once, or CRIU has them, too."""
    processes, hidden = tree
    whole = files_of(processes)
    parted = [split(process, large) for process, large in zip(processes, hidden, strict=True)]
    with dumping() as dump:
        plugin = dump.plugin()
        plugin.ready()
        for process, (_, pages) in zip(processes, parted, strict=True):
            memory: int | None = memory_of(process.memory())
            ranges = [(at, at + count * PAGE) for at, count in runs_of(sorted(pages))]
            there = runs_of(sorted(process.memory()))
            for at, count in rng.sample(there, min(more, len(there))):
                begin = rng.randrange(count)
                ranges.append((at + begin * PAGE, at + rng.randint(begin + 1, count) * PAGE))
            for first in range(0, len(ranges), most):
                plugin.name(process.pid, ranges[first : first + most], memory if not first else None)
            assert memory is not None
            os.close(memory)
        with FakeCriu(dump.directory / stream.CAPTURE_SOCKET) as criu:
            criu.dump(order(files_of([process for process, _ in parted])))
            found = dump.finish()
    assert found.keys() == whole.keys()
    for name, data in whole.items():
        if name.startswith("pagemap-"):
            assert as_lazy(data) == as_lazy(found[name])
            assert pagemap.parse(data).pages_id == pagemap.parse(found[name]).pages_id
        else:
            assert data == found[name], name


@contextmanager
def one_dumped(*packets: list[tuple[int, int]]) -> Iterator[tuple[Dump, Plugin, int]]:
    """A dump of ONE: the plugin has named these ranges and CRIU has written its files. No descriptor is left of it."""
    before = len(os.listdir("/proc/self/fd"))
    memory = memory_of(LARGE)
    with dumping() as dump:
        plugin = dump.plugin()
        plugin.ready()
        for ranges in packets:
            plugin.name(2, ranges, memory)
        with FakeCriu(dump.directory / stream.CAPTURE_SOCKET) as criu:
            criu.dump(order(files_of([ONE])))
            yield dump, plugin, memory
    os.close(memory)
    assert before == len(os.listdir("/proc/self/fd"))


def test_what_the_plugin_has_said_is_heard_in_time():
    """Before CRIU ends a pagemap the plugin has named all pages of the process."""
    memory, files = memory_of(LARGE), order(files_of([ONE]))
    with dumping(slow=True) as dump:
        plugin = dump.plugin()
        plugin.ready()
        with FakeCriu(dump.directory / stream.CAPTURE_SOCKET) as criu:
            for name in files:
                criu.begin(name)
            with dump.capture._changed:
                assert dump.capture._changed.wait_for(lambda: len(dump.capture.names) == len(files), LIMIT_S)
            plugin.name(2, [RANGE], memory)
            for name, data in files.items():
                criu.write(name, data)
                criu.end(name)
            criu.dump({})
            assert b"".join([*ONE.memory().values(), *LARGE.values()]) == dump.finish()["pages-1.img"]
    os.close(memory)


ONE = Process(2, 1, [Mapping(AT, 50, {n: bytes([n]) * PAGE for n in range(50)})])
LARGE = {AT + (100 + n) * PAGE: bytes([200 - n]) * PAGE for n in range(100)}
RANGE = (AT + 100 * PAGE, AT + 200 * PAGE)


@pytest.mark.parametrize("connected", [False, True])
def test_without_a_plugin_at_work_all_comes_from_criu(connected):
    """It is not there, or has found no way into CRIU; then it is silent."""
    with dumping() as dump:
        if connected:
            dump.plugin()
        with FakeCriu(dump.directory / stream.CAPTURE_SOCKET) as criu:
            criu.dump(order(files_of([ONE])))
            assert files_of([ONE]) == dump.finish()


def failing(act, *, pages: bool = True) -> Exception:
    """What a dump fails with, in which the plugin does something."""
    with dumping() as dump:
        plugin = dump.plugin()
        plugin.ready()
        act(plugin)
        files = order(files_of([ONE]))
        if not pages:
            files["pages-1.img"] = files["pages-1.img"][:-PAGE]
        with (
            contextlib.suppress(GpucrError, OSError),  # CRIU may notice first that the stream is gone
            FakeCriu(dump.directory / stream.CAPTURE_SOCKET) as criu,
        ):
            criu.dump(files)
            dump.capture.drain(LIMIT_S)
        with pytest.raises(GpucrError) as found:
            dump.capture.drain(LIMIT_S)
        return found.value


def test_page_that_criu_has_twice_is_refused():
    """Two of them would leave one process with the other's content from there on."""
    data = files_of([ONE])["pagemap-2.img"]
    with pytest.raises(ImageError, match="has page 0x40031000 twice"):
        pagemap.merged(data + protobuf.encode({1: AT + 49 * PAGE, 4: 4, 5: 1}), [RANGE])


def test_pages_of_a_process_that_criu_does_not_have_are_missed():
    """They would be in no pagemap: silent loss."""
    memory = memory_of(LARGE)
    found = failing(lambda plugin: plugin.name(3, [RANGE], memory))
    os.close(memory)
    assert isinstance(found, MemoryUnreadable)
    assert "process 3: CRIU's pagemap lacks pages" in str(found)


def test_pages_that_are_named_too_late_are_missed():
    """After the pagemap has come to its end nobody would read them."""
    with one_dumped([(RANGE[0], RANGE[1] - PAGE)]) as (dump, plugin, _):
        dump.capture.drain(LIMIT_S)
        plugin.name(2, [(RANGE[1] - PAGE, RANGE[1])], None)
        with pytest.raises(MemoryUnreadable, match="lacks pages"):
            dump.capture.drain(LIMIT_S)


def test_pagemap_in_another_order_is_refused():
    """The bytes of the pages file lie in the order of its entries."""
    data = files_of([ONE])["pagemap-2.img"]
    with pytest.raises(ImageError, match="not in the order of their addresses"):
        pagemap.merged(data + protobuf.encode({1: AT - 100 * PAGE, 4: 4, 5: 1}), [])


def test_memory_is_nobodys_to_read_after_the_dump():
    """The process runs on while its image is sealed."""
    with one_dumped([RANGE]) as (dump, _, memory):
        dump.capture.drain(LIMIT_S)
        assert len(same_file(memory)) == 2
        dump.memory.close()
        assert same_file(memory) == [memory]
        assert dump.memory.size_bytes == 100 * PAGE
        assert len(LARGE) + 50 == len(dump.finish()["pages-1.img"]) // PAGE


def same_file(fd: int) -> list[int]:
    """Open descriptors of a file."""
    inode, found = os.fstat(fd).st_ino, []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.fstat(int(name)).st_ino == inode and "memfd:mem" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
    return found


def test_pages_that_are_missing_are_noticed():
    found = failing(Plugin.ready, pages=False)
    assert isinstance(found, MemoryUnreadable)
    assert f"{49 * PAGE} bytes, {50 * PAGE} expected" in str(found)


def test_memory_that_cannot_be_read_fails_the_dump():
    """With a class of its own, so that the agent can tell it from CRIU's troubles."""
    memory = memory_of({})
    found = failing(lambda plugin: plugin.name(2, [RANGE], memory))
    os.close(memory)
    assert isinstance(found, MemoryUnreadable)


@pytest.mark.parametrize(
    "packet", [b"x", struct.pack("=II", 2, 1), struct.pack("=IIQQ", 2, 2, AT, AT + PAGE), struct.pack("=IIQ", 2, 1, AT)]
)
def test_bad_packet_fails_the_dump_and_releases_the_plugin(packet):
    """CRIU must not wait for somebody who does not hear it any more."""
    released = threading.Event()

    def speak(plugin: Plugin) -> None:
        plugin.sock.send(packet)
        try:
            while True:
                plugin.sock.send(bytes(8))
        except (BrokenPipeError, ConnectionResetError):
            released.set()

    found = failing(speak)
    assert isinstance(found, MemoryUnreadable)
    assert "CRIU's plugin" in str(found)
    assert released.is_set()


def test_descriptors_are_closed():
    with one_dumped([RANGE], []) as (dump, _, _):
        assert len(LARGE) + 50 == len(dump.finish()["pages-1.img"]) // PAGE
