"""Every command and option that the documents name is one that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gpucr_hpc.cli import app

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OURS = re.compile(r"--(?:checkpoint-[a-z-]+|no-checkpoint|restore-from)")


def code(text: str) -> Iterator[str]:
    """Code in a document: indented lines and what stands between back quotes, also over the end of a line."""
    lines = text.splitlines()
    yield from (line.strip() for line in lines if line.startswith("    "))
    plain = "\n".join("" if line.startswith("    ") else line for line in lines)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", plain))


def calls(name: str) -> Iterator[tuple[Path, str]]:
    """What follows `name` in the documents' code, up to the end of the command."""
    for path in DOCS:
        for piece in code(path.read_text()):
            for match in re.finditer(rf"(?:^|[ \"'(]){name}([^|;&#]*)", piece):
                yield path, match[1].partition("   ")[0]


def command_of(words: list[str]) -> tuple[Any, str]:
    """The command that these words begin with, and how it is called; None for one that is not there."""
    found: Any = typer.main.get_command(app)
    called = ["gpucr"]
    while found is not None and hasattr(found, "commands") and words and re.fullmatch(r"[a-z]+", words[0]):
        called.append(words.pop(0))
        found = found.commands.get(called[-1])
    return found, " ".join(called)


def options_of(command: Any) -> set[str]:
    return {"--help"} | {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_commands_and_their_options() -> None:
    seen, wrong = set(), []
    for path, rest in calls("gpucr (?=[a-z-])"):
        command, called = command_of(rest.split())
        if command is None:
            wrong.append(f"{path.name}: {called}")
            continue
        seen.add(called)
        known = options_of(command)
        wrong += [f"{path.name}: {called} {option}" for option in OPTION.findall(rest) if option not in known]
    assert wrong == []
    assert len(seen) > 15


def test_options_of_sbatch() -> None:
    """All of ours are in docs/user.md, and none that the plugin does not take is anywhere."""
    source = "".join((ROOT / "spank_plugin" / name).read_text() for name in ("options.c", "options.h"))
    table = source[source.index("static struct spank_option table[]") :]
    names = re.findall(r'^\t\{ (?:"([a-z-]+)"|(OPTION_[A-Z]+))', table, re.MULTILINE)
    values = dict(re.findall(r'#define (OPTION_[A-Z]+) "([a-z-]+)"', source))
    taken = {f"--{name or values[constant]}" for name, constant in names}
    assert "--checkpoint-on-preempt" in taken
    named = {(path.name, option) for path in DOCS for option in OURS.findall(path.read_text())}
    assert [pair for pair in sorted(named) if pair[1] not in taken] == []
    assert taken <= {option for name, option in named if name == "user.md"}


def test_keys_of_the_plugin() -> None:
    """docs/admin.md has them all, with their defaults in the example."""
    keys = set(re.findall(r'KEY\("([a-z_]+)"\)', (ROOT / "spank_plugin/config.c").read_text()))
    section = (ROOT / "docs/admin.md").read_text().partition("### plugstack.conf")[2].partition("\n### ")[0]
    assert keys == set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE))
    example = (ROOT / "spank_plugin/plugstack.conf.example").read_text()
    assert keys == set(re.findall(r" ([a-z_]+)=", example.splitlines()[-1]))


def scripts() -> dict[str, set[str]]:
    """Scripts that are named, with the options that are given to them."""
    found: dict[str, set[str]] = {}
    for _, rest in calls("(?:[A-Z_]+=\\S+ )*scripts/(?=[a-z])"):
        name = re.match(r"\w+", rest)
        if name:
            found.setdefault(name[0], set()).update(OPTION.findall(rest))
    return found


def source(script: Path) -> str:
    """The script and the module that it starts."""
    text = script.read_text()
    for module in re.findall(r"-m ((?:gpucr_hpc|tests)[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        paths = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        text += "".join(path.read_text() for path in paths)
    return text


@pytest.mark.parametrize(("name", "given"), sorted(scripts().items()))
def test_scripts(name: str, given: set[str]) -> None:
    script = ROOT / "scripts" / name
    assert script.is_file()
    text = source(script)
    assert [option for option in sorted(given) if not re.search(rf"{option}(?![\w-])", text)] == []
