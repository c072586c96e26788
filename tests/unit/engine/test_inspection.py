"""What `gpucr inspect` says of an image: memory by kind and way, and where a pattern lies."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from criu_image import PAGE, pagemap
from image_sample import FILE, HEAP, STACK, processes
from site_sample import IDS, JOB, Site

from gpucr_hpc.capsule.processes import read_process
from gpucr_hpc.engine import inspection, summary
from gpucr_hpc.image.reader import ImageReader

RNG = random.Random(7)
RANDOM = RNG.randbytes(3 << 20)
TEXT = b"the same line again and again\n" * (2 << 20)


@pytest.fixture
def reader(site: Site):
    """Process 5: 3 MiB of random heap, 2 MiB of text behind a hole, a stack; process 6: the same heap, and zeros."""
    heap = [(HEAP, 768), (HEAP + 0x400000, 512), (FILE, 1), (STACK, 2)]
    other = [(HEAP, 768), (HEAP + 0x400000, 256)]
    pages = RANDOM + TEXT[: 2 << 20] + b"f" * PAGE + b"s" * 2 * PAGE
    site.add(IDS[0], {
        "summary.json": processes(5, 6),
        "pagemap-5.img": pagemap(1, heap), "pages-1.img": pages,
        "pagemap-6.img": pagemap(2, other), "pages-2.img": RANDOM + bytes(1 << 20),
        "pagemap-shmem-9.img": pagemap(3, [(0, 4)]), "pages-3.img": RNG.randbytes(4 * PAGE),
        "inventory.img": b"x" * 50,
    })  # fmt: skip
    with ImageReader(
        lambda name: site.store.open(JOB, IDS[0], name),
        site.manifest(IDS[0]).images[0],
        checkpoint=IDS[0],
        key=site.keys[IDS[0]],
    ) as found:
        yield found


def test_memory_by_kind_and_way(reader):
    """Each mapping has what the image holds of it; nothing is counted twice, nothing is lost."""
    report = inspection.describe(reader)
    first, second = report["processes"]
    assert [5, 6] == [first["pid"], second["pid"]]
    assert "maps" not in first
    by_path = {region["path"]: region for region in first["memory"]}
    heap = by_path["[heap]"]
    assert ("anonymous", {"raw": 3 << 20, "compressed": 2 << 20}) == (heap["kind"], heap["image_bytes"])
    assert {"file", "shared"} == {by_path[p]["kind"] for p in ("/usr/lib/with space.so", "/dev/zero (deleted)")}
    assert {"compressed": PAGE} == by_path["/usr/lib/with space.so"]["image_bytes"]
    assert {"compressed": 2 * PAGE} == by_path["[stack]"]["image_bytes"]
    assert {} == by_path["/dev/zero (deleted)"]["image_bytes"]
    assert {"repeated": 3 << 20, "zero": 1 << 20} == second["memory"][0]["image_bytes"]
    assert {"raw": 4 * PAGE} == report["shared_memory"]
    sizes = {stream["name"]: sum(stream["ways"].values()) for stream in report["streams"]}
    assert sizes == {name: reader.size(name) for name in reader.names()}


def test_pages_outside_of_every_mapping(reader, monkeypatch):
    """They are counted in a region of their own."""
    monkeypatch.setattr(inspection.summary, "decode", lambda _: [])
    first = inspection.describe(reader)["processes"][0]
    held = sum(sum(region["image_bytes"].values()) for region in first["memory"])
    assert (5 << 20) + 3 * PAGE == held


def test_image_of_an_older_release(site):
    """Without a summary the numbers are still there."""
    site.add(IDS[1], {"pagemap-5.img": pagemap(1, [(HEAP, 1)]), "pages-1.img": b"x" * PAGE})
    with ImageReader(
        lambda name: site.store.open(JOB, IDS[1], name), site.manifest(IDS[1]).images[0], checkpoint=IDS[1],
        key=site.keys[IDS[1]],
    ) as found:  # fmt: skip
        (process,) = inspection.describe(found)["processes"]
    assert (5, {"compressed": PAGE}) == (process["pid"], process["memory"][0]["image_bytes"])


def places(reader, pattern: bytes, context: int = 4, limit: int = 1000) -> list[tuple[int, int]]:
    return [(p["pid"], p["address"]) for p in inspection.search(reader, pattern, context, limit)]


@pytest.mark.parametrize("offset", [0, 1, 4090, (1 << 20) - 8, (1 << 20) - 1, 1 << 20, (2 << 20) - 3, (3 << 20) - 16])
def test_pattern_is_found_wherever_it_lies(reader, offset):
    """At the beginning, over the end of a page, over the end of a chunk, at the end; in both processes."""
    pattern = RANDOM[offset : offset + 16]
    assert [(5, HEAP + offset), (6, HEAP + offset)] == places(reader, pattern)
    (first, _) = inspection.search(reader, pattern, 5, 10)
    around = bytes.fromhex(first["bytes"])
    assert pattern == around[first["before"] :][:16]
    assert around == RANDOM[max(0, offset - 5) : offset + 21]


def test_search_against_a_plain_one(reader):
    """Every match of a short pattern, also overlapping ones, where the memory is one piece."""
    text, found = TEXT[: 2 << 20], []
    at = text.find(b"again")
    while at >= 0:
        found.append((5, HEAP + 0x400000 + at))
        at = text.find(b"again", at + 1)
    assert found == places(reader, b"again", limit=10**6)
    assert [(5, STACK + n) for n in range(2 * PAGE - 99)] == places(reader, b"s" * 100, limit=10**6)


def test_bytes_of_two_mappings_are_no_match(reader):
    """What only the image has side by side was not so in memory."""
    assert [] == places(reader, RANDOM[-8:] + TEXT[:8])
    assert [] == places(reader, b"f" * 8 + b"s" * 8)
    (found,) = inspection.search(reader, RANDOM[-8:], 16, 1)
    assert bytes.fromhex(found["bytes"]).endswith(RANDOM[-8:]), "nor are they shown around one"


def test_limit(reader):
    assert 3 == len(places(reader, b"again", limit=3))


def test_shared_memory_is_searched(reader):
    assert [(0, 100)] == places(reader, reader.read("pages-3.img")[100:120])


# --- the summary ----------------------------------------------------------------------------------------


def test_summary_of_living_processes(tmp_path):
    """Command line, directory, descriptors, sockets and mappings of a real process and its child."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    code = "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); print('up',flush=True);"
    with tempfile.NamedTemporaryFile(dir=tmp_path) as log, listener:
        argv = [sys.executable, "-c", f"{code} sys.stdin.read()", str(port), "two words"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=tmp_path) as child:
            assert child.stdout.readline()
            found = [read_process(os.getpid()), read_process(child.pid)]
            done = summary.decode(summary.collect([p for p in found if p], os.getpid()))
            child.stdin.close()
    process = next(p for p in done if p["pid"] == found[1].nspid)
    assert argv == process["argv"]
    assert (found[0].nspid, str(tmp_path)) == (process["parent"], process["directory"])
    assert log.name == process["descriptors"]["2"]
    assert any(t.startswith("tcp 127.0.0.1:") and t.endswith(f"- 127.0.0.1:{port} ESTABLISHED")
               for t in process["descriptors"].values())  # fmt: skip
    assert any(region.path == "[stack]" for region in inspection.regions_of(process["maps"]))


def test_summary_leaves_out_what_is_gone():
    """A process that cannot be read any more is still in the tree."""
    with subprocess.Popen(["true"]) as child:
        found = read_process(child.pid)
    assert found is not None
    (process,) = summary.decode(summary.collect([found], os.getpid()))
    assert ([], "", {}) == (process["argv"], process["maps"], process["descriptors"])


def test_sockets_of_a_namespace(tmp_path):
    """Lines as proc_net_tcp(5) has them; a line of another form is passed over."""
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st ...\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 111 1\n"
        "   1: 0100C80A:0016 0200C80A:D431 01 00000000:00000000 00:00000000 00000000  0 0 112 1\n"
        "   odd\n"
    )
    (tmp_path / "tcp6").write_text(f"head\n   0: {'0' * 24}01000000:0050 {'0' * 32}:0000 0A 0:0 0:0 0  0 0 113 1\n")
    (tmp_path / "unix").write_text("head\n0000: 00000002 00000000 00010000 0001 01 114 /run/with space.sock\n")
    assert {
        "111": "tcp 127.0.0.1:8080 LISTEN",
        "112": "tcp 10.200.0.1:22 - 10.200.0.2:54321 ESTABLISHED",
        "113": "tcp6 [::1]:80 LISTEN",
        "114": "unix stream /run/with space.sock",
    } == summary.sockets(tmp_path)
    assert {} == summary.sockets(Path("/nonexistent"))
