"""gpucr inspect: through the agent for the owner, with a key for its holder; tables, JSON, SVG, search."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET

import pytest
from criu_image import PAGE, pagemap
from image_sample import FILE, HEAP, processes
from site_sample import IDS, JOB, Site

from gpucr_hpc.cli import cmd_inspect, memory_map
from gpucr_hpc.engine.inspection import describe
from gpucr_hpc.image.reader import ImageReader

SECRET = b"-----THE PASSPHRASE-----"


@pytest.fixture
def image(site: Site) -> Site:
    """One checkpoint, with a secret at the beginning of the second page of the heap of process 5."""
    pages = os.urandom(PAGE) + SECRET + os.urandom(PAGE - len(SECRET)) + os.urandom(PAGE)
    site.add(
        IDS[0],
        {
            "summary.json": processes(5, 6),
            "pagemap-5.img": pagemap(1, [(HEAP, 2), (FILE, 1)]),
            "pages-1.img": pages,
            "inventory.img": b"x",
        },
        phases_s={"capture": 0.25},
    )
    return site


@pytest.fixture
def agent(image, monkeypatch):
    """The agent's answer; its authorisation has tests of its own."""

    def ask(op, **fields):
        assert ("inspect", IDS[0]) == (op, fields["checkpoint"])
        manifest = image.manifest(IDS[0])
        with ImageReader(
            lambda name: image.store.open(JOB, IDS[0], name), manifest.images[0], checkpoint=IDS[0],
            key=image.keys[IDS[0]],
        ) as reader:  # fmt: skip
            return {"manifest": cmd_inspect.public(manifest), "store": "/s", "images": [describe(reader)]}

    monkeypatch.setattr(cmd_inspect, "ask", ask)


def test_tables(image, agent):
    """Tree, descriptors, memory by kind and a map; not a byte of memory."""
    text = image.run("inspect", IDS[0])
    for wanted in ("uid 2001", "capture 0.250 s", "node rank 0: n1", "python run.py", "/home/u/out.log", "anonymous"):
        assert wanted in text, wanted
    lines = [line.split() for line in text.splitlines()]
    (heap,) = [line for line in lines if line[:1] == ["anonymous"]]
    assert "8 KiB" in " ".join(heap)
    assert any(line[:2] == ["5", "p5"] and "#" in line[2] for line in lines)
    assert SECRET.decode() not in text


def test_json_and_svg(image, agent, tmp_path):
    """The same as data, and a file that is well-formed and names each mapping."""
    report = json.loads(image.run("inspect", IDS[0], "--json", "--svg", tmp_path / "map.svg"))
    assert "slots" not in report["manifest"]
    assert [5, 6] == [p["pid"] for p in report["images"][0]["processes"]]
    root = ET.fromstring((tmp_path / "map.svg").read_text())
    tips = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert 2 == len(tips)
    assert "8 KiB raw of 8 MiB mapped" in tips[0] and "[heap]" in tips[0]


def test_recipient_inspects_and_searches(image, tmp_path):
    """With his private key alone: no site key, no agent. The place is process, address and the bytes around it."""
    mine = tmp_path / "mine"
    image.run("key", "generate", "--recipient", mine)
    image.run("key", "rewrap", "--all", "--add", f"{mine}.pem")
    (image.root / "keys/site.key").unlink()
    (image.root / "keys/signing.key").unlink()
    assert "/home/u/out.log" in image.run("inspect", IDS[0], "--key", mine)
    found = json.loads(image.run("inspect", IDS[0], "--key", mine, "--memory", "PASSPHRASE", "--context", 9, "--json"))
    (place,) = found["places"]
    assert (5, "p5", HEAP + PAGE + 9) == (place["pid"], place["name"], place["address"])
    assert SECRET[:-5] + b"----" == bytes.fromhex(place["bytes"])[: len(SECRET) - 1]
    text = image.run("inspect", IDS[0], "--key", mine, "--memory", SECRET.hex(), "--hex")
    assert f"{HEAP + PAGE:#x}" in text and SECRET.decode() in text
    image.run("inspect", IDS[0], "--key", mine, "--memory", "not there", status=1)


def test_key_from_a_descriptor(image, tmp_path):
    mine = tmp_path / "mine"
    image.run("key", "generate", "--recipient", mine)
    image.run("key", "rewrap", "--all", "--add", f"{mine}.pem")
    with mine.open("rb") as file:
        assert "out.log" in image.run("inspect", IDS[0], "--key", f"fd:{file.fileno()}")
    image.run("inspect", IDS[0], "--key", "fd:999", status=81)


def test_who_has_no_key(image, tmp_path, monkeypatch):
    """A private key that is no recipient's, one that others can read, a user without any."""
    mine = tmp_path / "mine"
    image.run("key", "generate", "--recipient", mine)
    assert "sealed for" in image.run("inspect", IDS[0], "--key", mine, status=82)
    mine.chmod(0o644)
    assert "0644" in image.run("inspect", IDS[0], "--key", mine, status=81)
    monkeypatch.setattr(cmd_inspect.os, "geteuid", lambda: 2001)
    assert "needs a key" in image.run("inspect", IDS[0], "--memory", "x", status=2)


@pytest.mark.parametrize("pattern", [("zz", "--hex"), ("",), ("x" * 5000,)])
def test_bad_pattern(image, pattern):
    image.run("inspect", IDS[0], "--key", "x", "--memory", *pattern, status=2)


def test_strip_has_a_mark_for_every_part():
    """Parts in the order of addresses, each in proportion; a tiny one is not lost from an empty strip."""
    memory = [
        {"start": 0, "end": 9, "kind": "anonymous", "image_bytes": {"zero": 500}},
        {"start": 9, "end": 99, "kind": "anonymous", "image_bytes": {"raw": 250, "compressed": 250}},
    ]
    assert "·" * 10 + "#" * 5 + "+" * 5 == memory_map.strip(memory, 20).plain
    assert "" == memory_map.strip([], 20).plain
    assert 20 == len(memory_map.strip([memory[0] | {"image_bytes": {"raw": 1}}], 20).plain)
