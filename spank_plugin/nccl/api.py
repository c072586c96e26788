#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The public functions of NCCL as a table, and the C header made from it.

usage: api.py                   write api.h from api.txt
       api.py --check           fail when api.h is not what api.txt gives
       api.py --read FOLDER...  write api.txt from folders, each with one version's nccl.h (and nccl_device/)
       api.py --missing FOLDER  list what that version's headers have and api.txt has not, or has otherwise

A function is of one class: `collective` and `reduction` (all ranks call it; the latter takes an operator), `send`,
`receive`, `own` (written by hand in C) or `other` (takes a communicator, cannot be made again: passes through and
makes the process "not protected") and `plain` (takes none and is not wrapped: its name is known, no more).
New functions are `other` until somebody has looked at them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
CLASSES = {
    "collective": "AllGather AlltoAll Bcast Broadcast Gather Scatter",
    "reduction": "AllReduce Reduce ReduceScatter",
    "send": "Send",
    "receive": "Recv",
    "own": "CommAbort CommCount CommCuDevice CommDeregister CommDestroy CommFinalize CommGetAsyncError CommInitAll "
    "CommInitRank CommInitRankConfig CommInitRankScalable CommRegister CommRevoke CommShrink CommSplit CommUserRank "
    "GetErrorString GetLastError GetUniqueId GetVersion GroupEnd GroupSimulateEnd GroupStart MemAlloc MemFree "
    "RedOpCreatePreMulSum RedOpDestroy ResetDebugInit",
}
CLASS_OF = {f"nccl{name}": kind for kind, names in CLASSES.items() for name in names.split()}
PROTOTYPE = re.compile(r"(?:^|[;}\"])\s*((?:const\s+)?\w[\w\s\*]*?)\b(nccl[A-Z]\w*)\s*\(([^()]*)\)\s*;", re.MULTILINE)


def clean(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)", " ", text)
    text = re.sub(r"^\s*#[^\n]*", "", text, flags=re.MULTILINE)
    return re.sub(r"\b(NCCL_EXTERN_C|__host__|extern)\b", " ", text)


def parameters(text: str) -> str:
    """`const void* a, size_t b` in one spelling; no parameter is `void`."""
    parts = []
    for part in text.split(","):
        words = re.sub(r"\s*\*\s*", " *", " ".join(part.split()))
        words = re.sub(r"\*(\w)", r"*\1", words).replace("* *", "**")
        parts.append(re.sub(r"^(\w+) const \*", r"const \1 *", words))
    joined = ", ".join(parts).strip()
    return joined or "void"


def read(folder: Path) -> tuple[str, dict[str, str]]:
    """The version and the prototypes of one version's headers."""
    text = (folder / "nccl.h").read_text()
    numbers = [re.search(rf"#define NCCL_{n}\s+(\d+)", text) for n in ("MAJOR", "MINOR", "PATCH")]
    found = {}
    for path in [folder / "nccl.h", *sorted(folder.rglob("nccl_device/*.h"))]:
        for kind, name, args in PROTOTYPE.findall(clean(path.read_text())):
            if not re.search("typedef|inline|INLINE", kind):
                kind = re.sub(r"\s*\*\s*", " *", " ".join(kind.split()))
                found[name] = f"{kind}{'' if kind.endswith('*') else ' '}{name}({parameters(args)})"
    return ".".join(n[1] for n in numbers if n), found


def types(prototype: str) -> list[str]:
    """A prototype without its parameters' names."""
    head, _, args = prototype.rstrip(")").partition("(")
    return [head, *(re.sub(r"(?<=[\s*])\w+$", "", part.strip()).strip() for part in args.split(","))]


def load() -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Versions, and name -> (since, prototype)."""
    versions: list[str] = []
    table = {}
    for line in (HERE / "api.txt").read_text().splitlines():
        if line.startswith("versions:"):
            versions = line.split()[1:]
        elif line and not line.startswith("#"):
            since, _, prototype = line.partition(" ")
            table[re.search(r"(nccl\w+)\(", prototype)[1]] = (since, prototype)  # type: ignore[index]
    return versions, table


def key(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def collect(folders: list[Path]) -> str:
    table: dict[str, tuple[str, str]] = {}
    versions = []
    for version, found in sorted((read(f) for f in folders), key=lambda v: key(v[0])):
        versions.append(version)
        for name, prototype in found.items():
            since, known = table.get(name, (version, prototype))
            if types(known) != types(prototype) and "ncclComm_t" in known:
                raise SystemExit(f"{name} has changed:\n  {since}: {known}\n  {version}: {prototype}")
            table[name] = (since, prototype)
    lines = [
        f"{since} {prototype}"
        for since, prototype in sorted(table.values(), key=lambda v: v[1].split("(")[0].split()[-1])
    ]
    return "\n".join(
        [
            "# SPDX-License-Identifier: Apache-2.0",
            "# Public functions of NCCL: the first of these versions that has it, and its prototype (api.py --read).",
            f"versions: {' '.join(versions)}",
            *lines,
            "",
        ]
    )


def names(args: str) -> str:
    return "" if args == "void" else ", ".join(re.findall(r"(\w+)$", part.strip())[0] for part in args.split(","))


def header() -> str:
    versions, table = load()
    last = key(versions[-1])
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        "/* Made by api.py from api.txt, not by hand. F(name, result type, parameters, arguments) */",
        "#ifndef GPUCR_NCCL_API_H",
        "#define GPUCR_NCCL_API_H",
        f"#define NCCL_NEWEST_KNOWN {last[0] * 10000 + last[1] * 100 + last[2]} /* {versions[-1]} */",
    ]
    groups: dict[str, list[str]] = {}
    for name, (_, prototype) in table.items():
        match = re.fullmatch(r"(.*?)(nccl\w+)\((.*)\)", prototype)
        assert match, prototype
        kind = CLASS_OF.get(name, "other")
        if kind == "other" and "ncclComm_t comm" not in match[3]:
            kind = "plain"
        entry = f"F({name}, {match[1].strip()}, ({match[3]}), ({names(match[3])}))"
        groups.setdefault(kind, []).append(f"F({name})" if kind == "plain" else entry)
    for kind in ("collective", "reduction", "send", "receive", "own", "other", "plain"):
        out += [f"#define NCCL_{kind.upper()}(F) \\", *(f"\t{e} \\" for e in groups.get(kind, [])), ""]
    out += [
        "#define NCCL_WRAPPED(F) \\",
        "\tNCCL_COLLECTIVE(F) NCCL_REDUCTION(F) NCCL_SEND(F) NCCL_RECEIVE(F) NCCL_OWN(F) NCCL_OTHER(F)",
        "#endif",
        "",
    ]
    return "\n".join(out)


def main(args: list[str]) -> int:
    if args[:1] == ["--read"]:
        (HERE / "api.txt").write_text(collect([Path(a) for a in args[1:]]))
    elif args[:1] == ["--missing"]:
        version, found = read(Path(args[1]))
        table = load()[1]
        for name, prototype in found.items():
            if types(table.get(name, ("", ""))[1]) != types(prototype):
                print(f"{version} {prototype}")
    elif args == ["--check"]:
        if (HERE / "api.h").read_text() != header():
            print("spank_plugin/nccl/api.h is not what api.txt gives: run spank_plugin/nccl/api.py", file=sys.stderr)
            return 1
    elif not args:
        (HERE / "api.h").write_text(header())
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
