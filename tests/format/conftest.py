"""Fixtures of the format tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from chunks_library import set_library
from image_samples import Checkpoint, contents

from gpucr_hpc.image.keys import DataKey


@pytest.fixture(params=["python", "c"], autouse=True)
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who takes the steps of chunks."""
    set_library(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def make() -> Callable[..., Checkpoint]:
    def build(content: dict[str, bytes] | None = None, **values: Any) -> Checkpoint:
        key = values.pop("key", DataKey(b"k" * 32, b"i" * 32))
        return Checkpoint(contents() if content is None else content, key, **values)

    return build


@pytest.fixture(scope="session")
def good() -> Checkpoint:
    """A checkpoint that no test changes."""
    return Checkpoint(contents(), DataKey(b"k" * 32, b"i" * 32))
