"""Key files: what is accepted, what is refused, and that nothing shows a secret."""

from __future__ import annotations

import copy
import os
import pickle

import pytest

from gpucr_hpc.errors import KeyFileError
from gpucr_hpc.image.keyfiles import (
    generate_keys,
    load_signing_key,
    load_site_key,
    load_site_keys,
    load_trusted,
    rotate,
    stage,
)
from gpucr_hpc.image.keys import DataKey, PublicKey, SigningKey, SiteKey

RAW = bytes(range(32))


def put(path, data, mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("data", [RAW, RAW.hex().encode(), RAW.hex().upper().encode() + b"\n"])
def test_forms(tmp_path, data):
    """32 raw bytes and 64 hex digits with or without a newline are the same key."""
    assert SiteKey(RAW).key_id == load_site_key(put(tmp_path / "k", data)).key_id
    assert SigningKey(RAW).public == load_signing_key(tmp_path / "k").public


@pytest.mark.parametrize(
    "data", [b"", b"x", RAW + b"\n", RAW[:31], b"g" * 64, b"0" * 63, b"0" * 64 + b"\n\n", b"0" * 9999]
)
def test_malformed(tmp_path, data):
    """Anything else is refused without showing the content."""
    with pytest.raises(KeyFileError, match="want 32 raw bytes or 64 hex digits") as caught:
        load_site_key(put(tmp_path / "k", data))
    assert str(tmp_path / "k") in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666, 0o601])
def test_open_to_others(tmp_path, mode):
    """Any permission of group or others is refused."""
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}"):
        load_signing_key(put(tmp_path / "k", RAW, mode))


def test_not_a_regular_file(tmp_path):
    """Links, directories, FIFOs and missing files are refused, and a FIFO does not block."""
    put(tmp_path / "k", RAW)
    (tmp_path / "link").symlink_to(tmp_path / "k")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "missing", "."):
        with pytest.raises(KeyFileError):
            load_site_key(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_foreign_owner(tmp_path):
    """A key of another user is refused."""
    os.chown(put(tmp_path / "k", RAW), 12345, 0)
    with pytest.raises(KeyFileError, match="uid 12345"):
        load_site_key(tmp_path / "k")


def test_generate(tmp_path):
    """Generated keys load, differ, and are never replaced."""
    generate_keys(tmp_path / "keys")
    site, signing = load_site_key(tmp_path / "keys/site.key"), load_signing_key(tmp_path / "keys/signing.key")
    assert [signing.public] == load_trusted(tmp_path / "keys/trusted", signing)
    with pytest.raises(KeyFileError, match="already exists"):
        generate_keys(tmp_path / "keys")
    assert site.key_id == load_site_key(tmp_path / "keys/site.key").key_id
    generate_keys(tmp_path / "other")
    assert site.key_id != load_site_key(tmp_path / "other/site.key").key_id


def test_trusted(tmp_path):
    """Our own key comes first, each *.pub once, other files are left alone."""
    generate_keys(tmp_path / "a")
    generate_keys(tmp_path / "b")
    mine, other = load_signing_key(tmp_path / "a/signing.key"), load_signing_key(tmp_path / "b/signing.key")
    trusted = tmp_path / "a/trusted"
    for name in ("a", "b"):
        put(trusted / f"{name}.pub", (tmp_path / name / "signing.pub").read_bytes(), 0o644)
    put(trusted / "README", b"not a key", 0o644)
    assert [mine.public, other.public] == load_trusted(trusted, mine)
    assert [mine.public] == load_trusted(tmp_path / "missing", mine)


def test_trusted_must_not_be_writable_for_others(tmp_path):
    """Who can write there could have images restored as root: refused."""
    mine = SigningKey(RAW)
    trusted = tmp_path / "trusted"
    trusted.mkdir(mode=0o755)
    put(trusted / "x.pub", RAW, 0o664)
    with pytest.raises(KeyFileError, match=r"x\.pub"):
        load_trusted(trusted, mine)
    (trusted / "x.pub").unlink()
    trusted.chmod(0o775)
    with pytest.raises(KeyFileError, match="trusted"):
        load_trusted(trusted, mine)
    (tmp_path / "link").symlink_to(trusted)
    with pytest.raises(KeyFileError):
        load_trusted(tmp_path / "link", mine)


@pytest.mark.parametrize("key", [SiteKey(RAW), SigningKey(RAW), DataKey(RAW)])
def test_secrets_are_not_shown(key):
    """repr, str and pickle never give the key."""
    for text in (repr(key), str(key), f"{key}", repr({"key": key}), repr(vars(type(key)))):
        assert RAW.hex() not in text
        assert repr(RAW) not in text
    for leak in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError):
            leak(key)


def test_key_ids_differ_from_keys():
    """A key id is no part of the key, and signatures verify with the public key only."""
    assert SiteKey(RAW).key_id not in RAW.hex()
    signing = SigningKey(RAW)
    assert signing.public.verifies(signing.sign(b"x"), b"x")
    assert not signing.public.verifies(signing.sign(b"x"), b"y")
    assert not PublicKey(bytes(32)).verifies(signing.sign(b"x"), b"x")
    with pytest.raises(ValueError):
        DataKey(b"short")


def test_rotation(tmp_path):
    """Staged, then current; the old one stays readable, and at no moment is one lost."""
    generate_keys(tmp_path)
    site, others = tmp_path / "site.key", tmp_path / "site.d"
    first = load_site_key(site).key_id
    with pytest.raises(KeyFileError, match="next"):
        rotate(site, others)
    assert first == load_site_key(site).key_id
    second = stage(site, others)
    assert [first, second] == [key.key_id for key in load_site_keys(site, others)]
    with pytest.raises(KeyFileError, match="already exists"):
        stage(site, others)
    assert (first, second) == rotate(site, others)
    assert [second, first] == [key.key_id for key in load_site_keys(site, others)]
    assert [f"{first}.key"] == os.listdir(others)
    third = stage(site, others)
    rotate(site, others)
    assert {first, second, third} == {key.key_id for key in load_site_keys(site, others)}
    for path in (site, *others.iterdir()):
        assert 0o600 == path.stat().st_mode & 0o777


def test_rotation_that_was_interrupted(tmp_path, monkeypatch):
    """Stopped between keeping the old key and the new one's place: doing it again completes it."""
    generate_keys(tmp_path)
    site, others = tmp_path / "site.key", tmp_path / "site.d"
    first, second = load_site_key(site).key_id, stage(site, others)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(KeyFileError, match="No space"):
            rotate(site, others)
    assert [first, second] == [key.key_id for key in load_site_keys(site, others)]
    assert (first, second) == rotate(site, others)


def test_other_site_keys_must_be_closed_to_others(tmp_path):
    """A key in site.d is a key: the same rules."""
    generate_keys(tmp_path)
    put(tmp_path / "site.d/x.key", RAW, 0o644)
    with pytest.raises(KeyFileError, match=r"x\.key"):
        load_site_keys(tmp_path / "site.key", tmp_path / "site.d")
    put(tmp_path / "site.d/x.key", RAW)
    put(tmp_path / "site.d/notes.txt", b"", 0o644)
    assert 2 == len(load_site_keys(tmp_path / "site.key", tmp_path / "site.d"))
    (tmp_path / "site.d").chmod(0o770)
    with pytest.raises(KeyFileError, match=r"site\.d"):
        load_site_keys(tmp_path / "site.key", tmp_path / "site.d")
