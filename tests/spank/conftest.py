"""Fixtures: a capsule on this machine, the test being its agent; srun's proxy, the test being shepherd and tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpucr_hpc.wire import Type

from .capsule_lab import Lab
from .proxy_lab import ProxyLab


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture
def up(lab: Lab) -> Lab:
    assert Type.READY == lab.capsule().type
    return lab


@pytest.fixture
def proxy() -> Iterator[ProxyLab]:
    with ProxyLab() as made:
        yield made
