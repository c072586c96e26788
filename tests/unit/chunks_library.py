"""The C steps of chunks, built from this tree for the tests, or the reason why they cannot be."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpucr_hpc.image import native

_SOURCE = Path(__file__).resolve().parents[2] / "spank_plugin"
_HEADERS = ("openssl/evp.h", "lz4.h")


@functools.cache
def _built() -> native.Native:
    folder = Path(tempfile.mkdtemp(prefix="gpucr-chunks-"))
    try:
        target = f"{folder}/libgpucr_chunks.so"
        subprocess.run(["make", "-s", "-C", str(_SOURCE), f"B={folder}", target], check=True)
        return native.Native(Path(target))
    finally:
        shutil.rmtree(folder)


def chunks_library() -> native.Native:
    """The library. Skips the test where it cannot be built."""
    if not shutil.which("gcc") or not shutil.which("make"):
        pytest.skip("gcc and make are needed")
    asked = "".join(f"#include <{header}>\n" for header in _HEADERS)
    if subprocess.run(["gcc", "-E", "-"], input=asked, capture_output=True, text=True, check=False).returncode:
        pytest.skip("the headers of OpenSSL and LZ4 are needed")
    return _built()


def set_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have images written and read by "python" or by "c"."""
    monkeypatch.setattr(native, "library", chunks_library() if kind == "c" else None)
