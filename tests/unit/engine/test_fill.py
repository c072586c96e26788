"""Memory that is filled beside CRIU: every page goes one way, and the tree is the same."""

from __future__ import annotations

import io
import itertools
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from criu_image import PAGE, image, message
from criu_tree import PLAIN, Mapping, Process, files_of, runs_of
from hypothesis import given
from hypothesis import strategies as st

from gpucr_hpc.engine import fill, fillplan, pagemap
from gpucr_hpc.errors import ImageError, IntegrityError, RestoreFailed
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.store.memory import MemoryStore

JOB, ID, KEY = "41", "20261128T232501Z-3f9a", DataKey(b"k" * 32, b"i" * 32)
LARGE = fillplan.MAPPING_BYTES // PAGE
AT = 1 << 40
BITS = random.Random(5)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Trees of some megabytes are worth it here."""
    monkeypatch.setattr(fillplan, "TREE_BYTES", 1)


def noise(pages: int, first: int = 0) -> dict[int, bytes]:
    return {first + n: BITS.randbytes(PAGE) for n in range(pages)}


@contextmanager
def stored(files: dict[str, bytes], store: MemoryStore | None = None) -> Iterator[ImageReader]:
    store = store or MemoryStore()
    staging = store.begin(JOB, ID)
    writer = ImageWriter(staging.create, checkpoint=ID, node_rank=0, key=KEY)
    for name, data in files.items():
        with writer.stream(name, pages=name.startswith("pages-")) as file:
            file.write(data)
    entry = writer.finish()
    staging.publish(b"manifest")
    with ImageReader(lambda name: store.open(JOB, ID, name), entry, checkpoint=ID, key=KEY) as reader:
        yield reader


def by_criu(reader: ImageReader, process: Process, number: int, parts: Sequence[fillplan.Part]) -> dict[int, bytes]:
    """The pages that CRIU restores of a process: its pagemap and its pages, both as they are served."""
    part = next((p for p in parts if p.pid == process.pid), None)
    data = part.pagemap if part else reader.read(f"pagemap-{process.pid}.img")
    with tempfile.TemporaryFile() as out:
        reader.copy_to_fd(f"pages-{number}.img", out.fileno(), without=part.left_out if part else ())
        out.seek(0)
        found = {
            address + n * PAGE: out.read(PAGE) for address, count in pagemap.parse(data).runs for n in range(count)
        }
        assert not out.read()
    return found


def by_us(reader: ImageReader, parts: Sequence[fillplan.Part], pid: int) -> dict[int, bytes]:
    """The pages that are written; the file in the place of /proc/PID/mem has holes where nothing was."""
    parts = [part for part in parts if part.pid == pid]
    if not parts:
        return {}
    with tempfile.TemporaryFile() as memory:
        written = fill.fill(reader, parts, {pid: memory.fileno()}, threading.Event())
        found, at = {}, 0
        while True:
            try:
                at = os.lseek(memory.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            found[at] = os.pread(memory.fileno(), PAGE, at)
            at += PAGE
    assert written == len(found) * PAGE
    return found


def both_ways(processes: Sequence[Process], patches: pagemap.Patches | None = None) -> dict[int, set[int]]:
    """Addresses that are filled, by pid; that both ways together make the memory, and no page twice, is checked."""
    filled = {}
    with stored(files_of(processes)) as reader:
        parts = fillplan.make(reader, patches or {})
        for number, process in enumerate(processes, 1):
            criu, ours = by_criu(reader, process, number, parts), by_us(reader, parts, process.pid)
            assert not criu.keys() & ours.keys()
            whole = process.memory()
            missing = whole.keys() - criu.keys() - ours.keys()
            assert not any(any(whole[at]) for at in missing), "only what is zero may be left out"
            assert whole == criu | ours | {at: bytes(PAGE) for at in missing}
            filled[process.pid] = set(ours)
    return filled


def covered(mapping: Mapping, filled: set[int]) -> int:
    return sum(mapping.start <= at < mapping.end for at in filled)


def test_large_private_memory_is_filled_and_the_rest_is_not():
    heap = Mapping(AT, 2 * LARGE, noise(LARGE) | noise(300, LARGE + 100), PLAIN | {7: 0x221})
    small = Mapping(heap.end, LARGE - 1, noise(LARGE - 1))
    others = [
        Mapping(AT + (64 << 20) * (n + 1), LARGE, noise(LARGE), PLAIN | kind)
        for n, kind in enumerate(
            (
                {5: 1},  # read only
                {5: 0},  # PROT_NONE
                {5: 7},  # may be run
                {6: 0x21},  # shared
                {6: 0x2, 7: 0x41},  # a file
                {6: 0x122},  # grows down
                {6: 0x40022},  # huge pages
                {7: 0x203},  # the stack
                {7: 0x2200},  # AIO ring
                {7: 0x8200},  # shadow stack
            )
        )
    ]
    filled = both_ways([Process(5, 1, [heap, small, *others])])[5]
    assert covered(heap, filled) > LARGE
    assert all(covered(mapping, filled) == 0 for mapping in [small, *others])


def test_locked_and_unreserved_memory_is_filled():
    heap = Mapping(AT, LARGE, noise(LARGE), PLAIN | {6: 0x6022})
    assert covered(heap, both_ways([Process(5, 1, [heap])])[5]) > LARGE // 2


def test_what_a_child_has_in_common_with_its_parent_stays_with_criu():
    """CRIU shares these pages between the two; grandchildren and siblings with their own memory do not matter."""
    shared, own = noise(LARGE), AT + (1 << 30)
    parent = Process(5, 1, [Mapping(AT, LARGE, shared), Mapping(own, LARGE, noise(LARGE))])
    child = Process(6, 5, [Mapping(AT, LARGE, shared | noise(20)), Mapping(own, LARGE + 1, noise(LARGE))])
    stranger = Process(7, 5, [Mapping(AT + PAGE, LARGE, noise(LARGE))])
    grandchild = Process(8, 7, [Mapping(AT, LARGE, noise(LARGE))])
    filled = both_ways([parent, child, stranger, grandchild])
    assert covered(parent.mappings[0], filled[5]) == covered(child.mappings[0], filled[6]) == 0
    assert all(len(filled[pid]) > LARGE // 2 for pid in filled)


def test_pages_that_the_kernel_writes_stay_with_criu():
    """A registered rseq area."""
    heap = Mapping(AT, 2 * LARGE, noise(2 * LARGE))
    rseq = heap.start + LARGE * PAGE + 4080  # over the end of a page
    filled = both_ways([Process(5, 1, [heap], rseq)])[5]
    assert not {rseq // PAGE * PAGE, rseq // PAGE * PAGE + PAGE} & filled
    assert len(filled) > LARGE


def test_patched_pages_stay_with_criu():
    heap = Mapping(AT, 2 * LARGE, noise(2 * LARGE))
    filled = both_ways([Process(5, 1, [heap])], {"pages-1.img": [(LARGE * PAGE, b"x" * PAGE)]})[5]
    assert heap.start + LARGE * PAGE not in filled
    assert len(filled) > LARGE


def test_zeros_are_not_written():
    zeros = {n: bytes(PAGE) for n in range(LARGE)}
    heap = Mapping(AT, 2 * LARGE, zeros | noise(LARGE, LARGE))
    filled = both_ways([Process(5, 1, [heap])])[5]
    assert LARGE // 2 < len(filled) <= LARGE + 32


def test_small_tree_is_left_to_criu(monkeypatch):
    monkeypatch.setattr(fillplan, "TREE_BYTES", 3 * LARGE * PAGE)
    assert both_ways([Process(5, 1, [Mapping(AT, 2 * LARGE, noise(2 * LARGE))])]) == {5: set()}


@given(st.data())
def test_split_agrees_with_page_by_page(data):
    """Runs, chunks and ranges of any kind: a chunk is taken when every page of it may be, and the pagemap that is left
    has the other pages, in order."""
    pages = sorted(data.draw(st.sets(st.integers(0, 60), max_size=40)))
    runs = [part for run in runs_of([p * PAGE for p in pages]) for part in data.draw(st.just(_cut(run, data.draw)))]
    borders = sorted(data.draw(st.sets(st.integers(1, max(1, 4 * len(pages) - 1)), max_size=12)))
    ends = [b * PAGE // 4 for b in borders if b < 4 * len(pages)] + [len(pages) * PAGE]
    bounds = sorted(data.draw(st.sets(st.integers(0, 60), max_size=8)))
    ranges = [(a * PAGE, b * PAGE) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    chunks = list(itertools.pairwise([0, *ends])) if pages else []
    kept = sorted(data.draw(st.sets(st.integers(0, 60), max_size=3)))
    found = fillplan.split(runs, [0, *ends] if pages else [0], ranges, [n * PAGE for n in kept])
    assert all(one.stop < other.start for (one, _), (other, _) in itertools.pairwise(found))
    taken = [(n, chunks[n]) for numbers, _ in found for n in numbers]
    assert all((chunks[numbers[0]][0], chunks[numbers[-1]][1]) == place for numbers, place in found)

    expected = []
    for number, (begin, end) in enumerate(chunks):
        inside = begin % PAGE == end % PAGE == 0 and all(
            any(a <= pages[n] * PAGE < b for a, b in ranges) for n in range(begin // PAGE, end // PAGE)
        )
        if inside and not any(begin <= n * PAGE < end for n in kept):
            expected.append((number, (begin, end)))
    assert taken == expected

    entries = [message({1: at, 2: 0, 4: 4, 5: count}) for at, count in runs]
    hole = message({1: 99 * PAGE, 2: 0, 4: 2, 5: 3})
    reduced = pagemap.without(image(message({1: 3}), hole, *entries, hole), [place for _, place in found])
    gone = {n for _, (a, b) in taken for n in range(a // PAGE, b // PAGE)}
    left = [at + n * PAGE for at, count in pagemap.parse(reduced).runs for n in range(count)]
    assert left == [p * PAGE for n, p in enumerate(pages) if n not in gone]
    assert pagemap.parse(reduced).pages_id == 3
    assert reduced.count(hole) == 2


def _cut(run: tuple[int, int], draw) -> list[tuple[int, int]]:
    """CRIU has neighbours in two runs where mappings meet."""
    first = draw(st.integers(0, run[1]))
    parts = [(run[0], first), (run[0] + first * PAGE, run[1] - first)]
    return [part for part in parts if part[1]]


@pytest.mark.parametrize("name", ["mm-5.img", "core-5.img", "pstree.img", "pagemap-5.img"])
@pytest.mark.parametrize("bad", [b"", b"12345678\xff\xff\xff\xff", b"12345678\x02\0\0\0\x2a\x50"])
def test_files_out_of_shape_are_refused_or_left_to_criu(name, bad):
    files = files_of([Process(5, 1, [Mapping(AT, LARGE, noise(LARGE))])]) | {name: bad}
    with stored(files) as reader:
        try:
            parts = fillplan.make(reader, {})
        except ImageError:
            return
        assert not parts or name in ("core-5.img", "pstree.img")


def test_damaged_chunk_ends_the_fill_before_it_is_written():
    """With the name of the pack; the chunk's place stays as it was."""
    store = MemoryStore()
    with stored(files_of([Process(5, 1, [Mapping(AT, LARGE, noise(LARGE))])]), store) as reader:
        (part,) = fillplan.make(reader, {})
        stream, number = reader.index.streams["pages-1.img"], 3
        assert number in part.left_out
        chunk, (offset, _, _) = stream.chunk(number), list(stream.places())[number]
        bad = reader.entry.packs[chunk.pack].name

        def open_(name: str) -> BinaryIO:
            data = bytearray(store.open(JOB, ID, name).read())
            if name == bad:
                data[chunk.offset + 5] ^= 1
            return io.BytesIO(data)

        with (
            ImageReader(open_, reader.entry, checkpoint=ID, key=KEY) as damaged,
            tempfile.TemporaryFile() as memory,
        ):
            with pytest.raises(IntegrityError, match=f"{bad}.*is not what was written"):
                fill.fill(damaged, [part], {5: memory.fileno()}, threading.Event())
            for _, _, address in part.addresses(offset, chunk.plain):
                assert not any(os.pread(memory.fileno(), PAGE, address))


def test_process_that_is_gone_ends_the_fill():
    """The kernel takes nothing then; of a closed descriptor it says so."""
    with stored(files_of([Process(5, 1, [Mapping(AT, LARGE, noise(LARGE))])])) as reader:
        parts = fillplan.make(reader, {})
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        memory = os.open(f"/proc/{child}/mem", os.O_RDWR)
        os.kill(child, 9)
        os.waitpid(child, 0)
        with pytest.raises(RestoreFailed, match="process 5 died while its memory was filled"):
            fill.fill(reader, parts, {5: memory}, threading.Event())
        os.close(memory)
        with pytest.raises(RestoreFailed, match=r"memory of process 5 at 0x1.* cannot be filled"):
            fill.fill(reader, parts, {5: memory}, threading.Event())


def test_fill_that_is_given_up_ends():
    with stored(files_of([Process(5, 1, [Mapping(AT, LARGE, noise(LARGE))])])) as reader:
        stopped = threading.Event()
        stopped.set()
        with tempfile.TemporaryFile() as memory, pytest.raises(RestoreFailed, match="given up"):
            fill.fill(reader, fillplan.make(reader, {}), {5: memory.fileno()}, stopped)


def test_threads_get_neighbours(monkeypatch):
    """Two threads in one huge page would both make one."""
    with stored(files_of([Process(5, 1, [Mapping(AT, 4 * LARGE, noise(4 * LARGE))])])) as reader:
        (part,) = fillplan.make(reader, {})
        spans = fill._Spans([part], reader)
        one, two = iter(spans), iter(spans)
        first, second = next(one), next(two)
        assert second.offsets[0] - first.offsets[0] >= fill.SPAN_BYTES
        spread = [first, second, *one, *two]
        assert all(span.offsets[-1] - span.offsets[0] < fill.SPAN_BYTES for span in spread)
        assert sorted(number for span in spread for number in span.numbers) == [
            number for number in range(len(reader.index.streams[part.pages])) if number in part.left_out
        ]


def test_processors_of_the_near_nodes(tmp_path: Path, monkeypatch):
    for node, listed in enumerate(("0-3,16-19\n", "4-7\n", "8\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(listed)
    monkeypatch.setattr(fill, "_NODES", tmp_path)
    assert fill._near([17]) == {0, 1, 2, 3, 16, 17, 18, 19}
    assert fill._near([5, 8]) == {4, 5, 6, 7, 8}
    assert fill._near([]) == set()
    for node in (1, 2, 3):
        (tmp_path / f"node{node}/cpulist").unlink()
    assert fill._near([17]) == set()
