"""Where the tests of images write them."""

from __future__ import annotations

import pytest
from chunks_library import set_library
from image_pair import ID

from gpucr_hpc.store.memory import MemoryStore
from gpucr_hpc.store.posix import PosixStore


@pytest.fixture(params=["python", "c"], autouse=True)
def steps(request, monkeypatch):
    """Who takes the steps of chunks."""
    set_library(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["posix", "memory"])
def store(request, tmp_path):
    return PosixStore(tmp_path / "store") if request.param == "posix" else MemoryStore()


@pytest.fixture
def staging(store):
    return store.begin("41", ID)
