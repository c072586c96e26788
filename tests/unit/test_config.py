"""Configuration: what is accepted, and how anything else is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gpucr_hpc import config
from gpucr_hpc.config import Config
from gpucr_hpc.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def _write(text: str):
        path = tmp_path / "gpucr.toml"
        path.write_text(text)
        return path

    return _write


def test_empty_file_and_no_file_are_the_defaults(write, tmp_path, monkeypatch):
    monkeypatch.delenv("GPUCR_CONFIG", raising=False)
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "none.toml")
    assert Config() == config.load() == config.load(write(""))


def test_values(write):
    read = config.load(write('[store]\nroot = "/p"\nallowed_roots = ["/a", "/b"]\n[engine]\ndump_timeout_s = 60\n'))
    assert ("/p", ("/a", "/b"), 60.0) == (read.store.root, read.store.allowed_roots, read.engine.dump_timeout_s)
    assert isinstance(read.engine.dump_timeout_s, float)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[stor]\n", r"unknown section \[stor\]"),
        ('[store]\nrot = "/p"\n', r"unknown key store\.rot"),
        ("store = 3\n", r"\[store\] must be a table"),
        ("[store]\nroot = 3\n", r"store\.root must be of type str"),
        ("[store]\nallowed_roots = [1]\n", r"store\.allowed_roots must be of type tuple"),
        ("[store]\npacks = 0\n", r"store\.packs must be from 1 to 100"),
        ("[store]\nfull_every = 251\n", r"store\.full_every must be from 1 to 250"),
        ("[store]\nkeep_last = true\n", r"store\.keep_last must be of type int"),
        ("[engine]\ndump_timeout_s = true\n", r"engine\.dump_timeout_s must be of type float"),
        ('[agent]\nwhen_unprotected = "maybe"\n', r"agent\.when_unprotected must be one of run, fail"),
        ("[store\n", "Expected"),
    ],
)
def test_refusal_names_file_and_key(write, text, reason):
    path = write(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.exit_code == 2


def test_named_file_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCR_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="no such file"):
        config.load()


def test_example_shows_every_default(pytestconfig):
    """packaging/gpucr.toml.example has each key with its default."""
    table = tomllib.loads((pytestconfig.rootpath / "packaging/gpucr.toml.example").read_text())
    assert Config() == config.parse(table, "example")
    for name, section in vars(Config()).items():
        assert set(vars(section)) == set(table[name]), name


def test_a_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gpucr.toml"
    path.write_bytes(b"[store]\nroot = '/caf\xe9'\n")
    with pytest.raises(ConfigError, match="gpucr"):
        config.load(path)
