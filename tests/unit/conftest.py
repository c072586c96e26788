"""Fixtures of several parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from site_sample import Site


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path)
