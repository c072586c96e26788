"""NCCL that is linked into a program is found by what is in the program's file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from gpucr_hpc.engine.cuda import processes as procfs


@pytest.mark.parametrize(("content", "found"), [(b"x" * 9000 + b"NCCL_SHM_DISABLE\0", True), (b"NCCL_DEBUG\0", False)])
def test_nccl_inside_of_a_program(tmp_path: Path, content: bytes, found: bool) -> None:
    """Only in what the process runs; a file that it merely reads may be a script with the variable's name."""
    path = tmp_path / "program"
    path.write_bytes(content)
    with path.open("rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            assert procfs.nccl_linked_in(os.getpid()) == ""
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC):
            assert procfs.nccl_linked_in(os.getpid()) == (str(path) if found else "")


def test_a_process_that_has_ended() -> None:
    assert procfs.nccl_linked_in(1 << 22) == ""
