"""gpucr key: generate, list, rotate, rewrap, on a real store through a real worker."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from site_sample import IDS, JOB

from gpucr_hpc.cli import rewrap as module
from gpucr_hpc.cli.cmd_doctor import _keys
from gpucr_hpc.cli.rewrap import Wish, rewrap
from gpucr_hpc.config import load
from gpucr_hpc.errors import CheckpointMissing
from gpucr_hpc.image.keyfiles import load_site_key, load_site_keys
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.recipients import Opener, new_key_pair, parse


def packs(site) -> dict[str, bytes]:
    """Every file of the store but the manifests."""
    files = [path for path in site.store._root.rglob("*") if path.is_file() and path.name != "manifest"]
    return {str(path): path.read_bytes() for path in files}


def test_rotation_from_beginning_to_end(site):
    """Stage, rotate, rewrap: at each step every checkpoint opens, no pack is touched, and the old key is idle then."""
    site.add(IDS[0])
    before, site_key, others = packs(site), site.root / "keys/site.key", site.root / "keys/site.d"
    first = load_site_key(site_key).key_id
    staged = json.loads(site.run("key", "rotate", "--stage", "--json"))["next"]
    listed = json.loads(site.run("key", "list", "--json"))["keys"]
    assert [(first, "current"), (staged, "next")] == [(k["id"], k["use"]) for k in listed if k["kind"] == "site"]
    assert {"old": first, "new": staged, "type": "rotated"} == json.loads(site.run("key", "rotate", "--json"))
    site.add(IDS[1])
    assert "would be rewrapped" in site.run("key", "rewrap", "--all", "--dry-run")
    assert first == site.manifest(IDS[0]).slots[0]["key_id"], "a dry run changes nothing"
    results = json.loads(site.run("key", "rewrap", "--all", "--json"))["checkpoints"]
    assert [(IDS[0], True), (IDS[1], False)] == [(r["checkpoint"], r["changed"]) for r in results]
    keys = load_site_keys(site_key, others)[:1]
    for checkpoint in IDS[:2]:
        key = DataKey.unwrap(site.manifest(checkpoint).slots, keys, checkpoint)
        assert site.keys[checkpoint].reveal_hex() == key.reveal_hex()
    assert before == {name: data for name, data in packs(site).items() if name in before}
    counts = {k["id"]: k["checkpoints"] for k in json.loads(site.run("key", "list", "--store", "--json"))["keys"]
              if k["kind"] == "site"}  # fmt: skip
    assert {staged: 2, first: 0} == counts


def test_recipients_come_and_go(site):
    """Added, he reads the checkpoint; removed, he has no slot; other slots and everything else stay."""
    site.add(IDS[0])
    site.add(IDS[1])
    mine = site.root / "mine"
    site.run("key", "generate", "--recipient", mine)
    assert 0o600 == mine.stat().st_mode & 0o777
    site.run("key", "rewrap", IDS[0], "--add", f"{mine}.pem")
    old = site.manifest(IDS[0])
    opener = Opener(mine.read_bytes(), mine)
    key = opener.unwrap(old.slots, IDS[0])
    with ImageReader(
        lambda name: site.store.open(JOB, IDS[0], name), old.images[0], checkpoint=IDS[0], key=key
    ) as reader:
        assert b"x" * 100 == reader.read("inventory.img")
    assert 1 == len(site.manifest(IDS[1]).slots)
    assert "unchanged" in site.run("key", "rewrap", IDS[0], "--add", f"{mine}.pem"), "he has a slot already"
    site.run("key", "rewrap", "--job", JOB, "--remove", opener.key_id)
    new = site.manifest(IDS[0])
    assert old.slots[:1] == new.slots
    assert {**old.as_dict(), "slots": 0} == {**new.as_dict(), "slots": 0}


def test_site_recipients_are_listed(site):
    """With their method; one that cannot be used is a warning, not a failure."""
    private, public = new_key_pair()
    (site.root / "auditor.pem").write_bytes(public)
    (site.root / "wrong.pem").write_bytes(private)
    site.configure(f'recipients = ["{site.root}/auditor.pem", "{site.root}/wrong.pem", "{site.root}/missing.pem"]')
    report = json.loads(site.run("key", "list", "--json"))
    found = [k for k in report["keys"] if k["kind"] == "recipient"]
    assert [(parse(public, "f")[0].key_id, "EC x25519")] == [(k["id"], k["use"]) for k in found]
    named = [p["message"].removeprefix(f"{site.root}/").split(".pem")[0] for p in report["problems"]]
    assert ["wrong", "missing"] == named


def test_damaged_checkpoint_does_not_stop_the_others(site):
    """It is named and left as it is; the status says that something was wrong."""
    site.add(IDS[0])
    site.add(IDS[1])
    path = Path(site.store.location) / JOB / IDS[0] / "manifest"
    path.write_bytes(path.read_bytes()[:-1])
    damaged = path.read_bytes()
    site.run("key", "rotate", "--stage")
    site.run("key", "rotate")
    said = site.run("key", "rewrap", "--all", status=52)
    assert f"{JOB}/{IDS[0]}/manifest" in said
    assert damaged == path.read_bytes()
    assert load_site_key(site.root / "keys/site.key").key_id == site.manifest(IDS[1]).slots[0]["key_id"]


def test_checkpoint_for_an_unknown_site_key(site):
    """Without the old key nothing can be rewrapped; both ids are named."""
    site.add(IDS[0])
    wanted = load_site_key(site.root / "keys/site.key").key_id
    (site.root / "keys/site.key").write_text("ab" * 32)
    assert wanted in site.run("key", "rewrap", "--all", status=82)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("key", "rewrap"), 2),
        (("key", "rewrap", IDS[3]), 62),
        (("key", "rotate"), 81),
        (("key", "rewrap", "--all", "--add", "/nonexistent.pem"), 81),
    ],
)
def test_usage(site, args, status):
    site.add(IDS[0])
    site.run(*args, status=status)


def test_manifest_changed_by_another_meanwhile(site, monkeypatch):
    """A pruning or rewrapping beside this one wins; nothing is overwritten unseen."""
    site.add(IDS[0])
    monkeypatch.setenv("GPUCR_CONFIG", str(site.config))
    path = Path(site.store.location) / JOB / IDS[0] / "manifest"
    real = module.manifest_file.encode

    def encode(*args):
        path.write_bytes(b"another")
        return real(*args)

    monkeypatch.setattr(module.manifest_file, "encode", encode)
    new = parse(new_key_pair()[1], "f")
    (result,) = asyncio.run(rewrap(load(), Wish(frozenset(), None, new, frozenset()), None, dry_run=False))
    assert "meanwhile" in str(result.problem)
    assert b"another" == path.read_bytes()
    with pytest.raises(CheckpointMissing):
        asyncio.run(rewrap(load(), Wish(frozenset([IDS[3]]), None, [], frozenset()), None, dry_run=False))


def test_no_secret_in_arguments_environment_or_output(site, monkeypatch, capfd):
    """What is started, with which environment, and everything that is printed: no key in any form."""
    site.add(IDS[0])
    private, public = new_key_pair()
    started: list[str] = []
    real = asyncio.create_subprocess_exec

    async def record(*args, **options):
        process = await real(*args, **options)
        started.append(repr((args, options.get("env"))))
        seen = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        started.extend(data.decode(errors="replace") for data in seen)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    monkeypatch.setenv("GPUCR_CONFIG", str(site.config))
    wish = Wish(frozenset(), None, parse(public, "f"), frozenset())
    results = asyncio.run(rewrap(load(), wish, None, dry_run=False))
    assert [True] == [r.changed for r in results]
    assert len(started) >= 3
    texts = [*started, *capfd.readouterr(), repr(results), repr([r.as_dict() for r in results])]
    texts += [site.run("key", "list", "--json", "--store"), site.run("key", "rotate", "--stage")]
    names = ("site.key", "signing.key", "site.d/next.key")
    secrets = [(site.root / "keys" / name).read_text().strip() for name in names]
    secrets += [key.reveal_hex()[part] for key in site.keys.values() for part in (slice(64), slice(64, 128))]
    secrets += private.decode().splitlines()[1:2]
    assert all(len(secret) >= 60 for secret in secrets)
    for secret in secrets:
        assert not any(secret in text or secret.upper() in text for text in texts)
        raw = repr(bytes.fromhex(secret))[2:-1] if len(secret) == 64 and not secret.startswith("MC") else secret
        assert not any(raw in text for text in texts)
    assert "GPUCR_CONFIG" in os.environ


def test_doctor_names_keys_and_recipients(site):
    """Each good one, and each that cannot be used with what it costs; a key open to others is a failure."""
    (site.root / "auditor.pem").write_bytes(new_key_pair()[1])
    site.configure(f'recipients = ["{site.root}/auditor.pem", "{site.root}/missing.pem"]')
    (site.root / "keys/site.d/x.key").write_text("cd" * 32)
    (site.root / "keys/site.d/x.key").chmod(0o644)
    found = [(f["what"], f["good"], f["detail"]) for f in _keys(load(site.config))]
    assert [("key", False), ("key", True), ("recipient", True), ("recipient", False)] == [f[:2] for f in found]
    assert "x.key" in found[0][2] and "missing.pem" in found[3][2]
