"""Steps through CRIU: see criu_steps.py."""

from __future__ import annotations

import os
import shutil

import pytest

from . import criu_steps
from .step_lab import built

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not built(), reason="spank_plugin is not built"),
    pytest.mark.skipif(not all(map(shutil.which, ("criu", "nft", "ip"))), reason="needs criu, nft and ip"),
]


def test_a_step_moves_in_the_middle_of_its_streams() -> None:
    """Proxy, shepherd and two tasks are dumped and restored three times; each line arrives once and in order."""
    criu_steps.main(3)
