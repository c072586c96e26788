"""Which of CRIU's test programs are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr_hpc.lab.criu_suite import programs

MAKEFILE = """
TST_NOFILE	:= \\
		env00	\\
		root00

TST_FILE = file00 \\
		$(OTHERS) missing00
TST_DIR	+= dir00
"""
DESCRIPTIONS = {
    "file00": "{'flavor': 'h ns', 'opts': '--link-remap',\n 'flags': 'nouser'}",
    "root00": "{'flags': 'suid'}",
    "dir00": "",
}


@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ("{'flavor': 'ns uns'}", False),
        ("{'arch': 'aarch64 s390x'}", False),
        ("{'arch': 'x86_64 s390x'}", True),
        ("{'opts': '--tcp-close'}", False),
        ('{"opts": "--tcp-established"}', True),
        ("{'flags': 'noauto'}", False),
    ],
)
def test_what_is_left_out(tmp_path: Path, description: str, wanted: bool) -> None:
    (tmp_path / "Makefile").write_text("TST_NOFILE := one\n")
    (tmp_path / "one").touch(0o755)
    (tmp_path / "one.desc").write_text(description)
    assert bool(programs(tmp_path)) == wanted


def test_programs_and_their_arguments(tmp_path: Path) -> None:
    """Those that were built; one without a description runs anywhere."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("env00", "root00", "file00", "dir00"):
        (tmp_path / name).touch(0o755)
    for name, text in DESCRIPTIONS.items():
        (tmp_path / f"{name}.desc").write_text(text)
    found = {program.name: program.arguments for program in programs(tmp_path)}
    assert found == {
        "dir00": "--dirname=d.test",
        "env00": "--envname=ENV_00_TEST",
        "file00": "--filename=x.test",
    }
