from __future__ import annotations

import shutil

import pytest

from tests.nccl import rig


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    if not shutil.which("gcc") or not shutil.which("make"):
        pytest.skip("gcc and make are needed")
    rig.build()
