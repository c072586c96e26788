"""gpucr inspect."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gpucr_hpc.agent.control import public
from gpucr_hpc.cli import access, memory_map, output
from gpucr_hpc.cli.client import ask
from gpucr_hpc.cli.options import CheckpointDir, Json
from gpucr_hpc.config import load
from gpucr_hpc.engine.inspection import WAYS
from gpucr_hpc.errors import UsageError
from gpucr_hpc.model import Manifest
from gpucr_hpc.units import format_bytes

_STRIP = 60


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint id, as `gpucr list` prints it.")],
    memory: Annotated[
        str | None, typer.Option("--memory", help="Search decrypted memory for this text. Needs a key: root, or --key.")
    ] = None,
    as_hex: Annotated[bool, typer.Option("--hex", help="The text of --memory is in hexadecimal digits.")] = False,
    context: Annotated[int, typer.Option("--context", help="Bytes shown around each place.", min=0, max=4096)] = 16,
    limit: Annotated[int, typer.Option("--limit", help="Stop after this many places.", min=1)] = 100,
    key: Annotated[
        str | None, typer.Option("--key", help="Private key (PEM, mode 0600) of a recipient, or fd:N.")
    ] = None,
    passphrase: Annotated[
        str | None, typer.Option("--passphrase", help="File with the passphrase of --key, or fd:N.")
    ] = None,
    signer: Annotated[
        Path | None, typer.Option("--signer", help="signing.pub of the site, where the node's cannot be read.")
    ] = None,
    checkpoint_dir: CheckpointDir = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the memory map into this file.")] = None,
    json: Json = False,
) -> None:
    """What a checkpoint holds: processes, descriptors, sockets, memory by kind; no page of memory is decrypted.

    With --memory its memory is searched, for who holds a key.
    """
    if memory is not None:
        if key is None and os.geteuid() != 0:
            raise UsageError(reason="--memory needs a key: run it as root, or give --key")
        pattern = _pattern(memory, as_hex)
        keys = access.recipient_keys(load(), key, passphrase, signer) if key else access.site_keys(load())
        places = asyncio.run(_places(keys, checkpoint, pattern, context, limit, checkpoint_dir))
        _show_places(checkpoint, places, json)
        return
    if key is None:
        report = ask("inspect", checkpoint=checkpoint, directory=checkpoint_dir)
    else:
        keys = access.recipient_keys(load(), key, passphrase, signer)
        report = asyncio.run(_inspect(keys, checkpoint, checkpoint_dir))
    if svg is not None:
        labelled = [(_label(p), p["memory"]) for image in report["images"] for p in image["processes"]]
        svg.write_text(memory_map.svg(f"job {report['manifest']['job']}, checkpoint {checkpoint}", labelled))
    if json:
        output.as_json(report | {"type": "inspection"})
    else:
        _show(report)


async def _inspect(keys: access.Keys, checkpoint: str, root: str | None) -> dict[str, Any]:
    config = load()
    async with access.opened(config, keys, root) as (catalog, worker):
        where = root or config.store.root
        manifest = access.find(await catalog.entries(), checkpoint, where)
        order = _order(manifest, keys)
        images = [await worker.call("inspect", entry=image.as_dict(), **order) for image in manifest.images]
    return {"manifest": public(manifest), "store": where, "images": images}


def _order(manifest: Manifest, keys: access.Keys) -> dict[str, Any]:
    """What every order to the worker about one checkpoint has."""
    key = keys.data_key(manifest).reveal_hex()
    return {"job": manifest.job, "checkpoint": manifest.checkpoint, "key": key}


# --- search ---------------------------------------------------------------------------------------------


def _pattern(text: str, as_hex: bool) -> bytes:
    try:
        pattern = bytes.fromhex(text) if as_hex else text.encode()
    except ValueError:
        raise UsageError(reason=f"{text!r} is not hexadecimal") from None
    if not 0 < len(pattern) <= 4096:
        raise UsageError(reason="--memory wants 1 to 4096 bytes")
    return pattern


def _show_places(checkpoint: str, places: list[dict[str, Any]], json: bool) -> None:
    """Exit code 1 when there is none, as grep does."""
    if json:
        output.as_json({"type": "places", "checkpoint": checkpoint, "places": places})
    else:
        rows = [
            (p["node_rank"], p["pid"] or "shared", p["name"], f"{p['address']:#x}", _dump(bytes.fromhex(p["bytes"])))
            for p in places
        ]
        output.table(("RANK", "PID", "PROCESS", "ADDRESS", "BYTES"), rows)
    if not places:
        raise typer.Exit(1)


async def _places(
    keys: access.Keys, checkpoint: str, pattern: bytes, context: int, limit: int, root: str | None
) -> list[dict[str, Any]]:
    config, found = load(), list[dict[str, Any]]()
    async with access.opened(config, keys, root) as (catalog, worker):
        manifest = access.find(await catalog.entries(), checkpoint, root or config.store.root)
        order = _order(manifest, keys)
        for image in manifest.images:
            about = await worker.call("inspect", entry=image.as_dict(), **order)
            names = {p["pid"]: p["name"] for p in about["processes"]}
            places = await worker.call(
                "search",
                entry=image.as_dict(),
                pattern=pattern.hex(),
                context=context,
                limit=limit - len(found),
                **order,
            )
            found += [{"node_rank": image.node_rank, "name": names.get(p["pid"], ""), **p} for p in places]
            if len(found) >= limit:
                break
    return found


def _dump(data: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in data)


# --- tables ---------------------------------------------------------------------------------------------


def _label(process: dict[str, Any]) -> str:
    return f"{process['pid']} {process['name']}"


def _show(report: dict[str, Any]) -> None:
    manifest, console = report["manifest"], Console(highlight=False, soft_wrap=True)
    meta = manifest["meta"]
    output.fields(
        [
            ("checkpoint", f"{manifest['checkpoint']} of job {manifest['job']}, uid {manifest['uid']}"),
            ("created", f"{manifest['created']}, reason {manifest['reason']}"),
            ("phases", ", ".join(f"{k} {v:.3f} s" for k, v in meta.get("phases_s", {}).items()) or "-"),
        ]
    )
    for number, image in enumerate(report["images"]):
        rank = meta["ranks"][number] if number < len(meta.get("ranks", [])) else {}
        print(f"\nnode rank {image['node_rank']}: {rank.get('node', '')}")
        for depth, process in _tree(image["processes"]):
            command = " ".join(process.get("argv") or []) or process["name"]
            print(f"  {'  ' * depth}{process['pid']} {command}  ({process.get('threads', '?')} threads)")
        if rank.get("gpu"):
            print(f"  GPU: {rank['gpu']}")
        _show_memory(image, console)
        rows = [
            (process["pid"], number, target)
            for process in image["processes"]
            for number, target in process.get("descriptors", {}).items()
        ]
        if rows:
            print()
            output.table(("PID", "FD", "FILE OR SOCKET"), rows)


def _tree(processes: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Processes with their depth, children behind their parents."""
    known = {process["pid"] for process in processes}
    found: list[tuple[int, dict[str, Any]]] = []
    waiting = [(0, p) for p in reversed(processes) if p["parent"] not in known or p["parent"] == p["pid"]]
    while waiting:
        depth, process = waiting.pop()
        found.append((depth, process))
        children = [p for p in processes if p["parent"] == process["pid"] != p["pid"]]
        waiting += [(depth + 1, child) for child in reversed(children)]
    return found


def _show_memory(image: dict[str, Any], console: Console) -> None:
    total: dict[str, Counter[str]] = {}
    for process in image["processes"]:
        for kind, counts in memory_map.by_kind(process["memory"]).items():
            total.setdefault(kind, Counter()).update(counts)
    if image["shared_memory"]:
        total.setdefault("shared", Counter()).update(image["shared_memory"])
    rest = Counter[str]()
    for stream in image["streams"]:
        if not stream["name"].startswith("pages-"):
            rest.update(stream["ways"])
    total["other files"] = rest
    print()
    rows = [
        (kind, *(format_bytes(total[kind][column]) if total[kind][column] else "-" for column in ("mapped", *WAYS)))
        for kind in ("anonymous", "shared", "file", "other files")
        if kind in total
    ]
    output.table(("MEMORY", "MAPPED", *(way.upper() for way in WAYS)), rows)
    strips = [(_label(p), memory_map.strip(p["memory"], _STRIP)) for p in image["processes"]]
    if any(strip for _, strip in strips):
        print()
        for label, strip in strips:
            if strip:
                console.print(Text(f"{label[:24]:24} ") + strip)
        marks = Text("  ").join(Text(f"{m} {way}", style=c) for way, (m, c, _) in memory_map.STYLES.items())
        console.print(Text(" " * 25) + marks)
    sys.stdout.flush()
