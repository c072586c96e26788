"""gpucr key."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from gpucr_hpc.agent import recipients as configured
from gpucr_hpc.cli import access, output
from gpucr_hpc.cli.options import CheckpointDir, Json
from gpucr_hpc.cli.rewrap import Wish, rewrap
from gpucr_hpc.config import load
from gpucr_hpc.errors import UsageError
from gpucr_hpc.image import keyfiles, recipients
from gpucr_hpc.image.keyfiles import read_public

app = typer.Typer(help="Keys of the site, and recipients of checkpoints.", no_args_is_help=True)


@app.command("generate")
def generate(
    directory: Annotated[Path, typer.Argument(help="Where to put them.")] = Path("/etc/gpucr/keys"),
    recipient: Annotated[
        Path | None,
        typer.Option("--recipient", help="Make a key pair of your own instead: FILE, and FILE.pem for others."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a site key and a signing key. Copy them to every node; who has them can read and make checkpoints."""
    if recipient is not None:
        public = keyfiles.write_pair(recipient, *recipients.new_key_pair())
        report = {"type": "generated", "private": str(recipient), "public": str(public)}
        text = f"{recipient}: private key, mode 0600; {public}: public key, for a file of recipients"
    else:
        keyfiles.generate_keys(directory)
        report = {"type": "generated", "directory": str(directory)}
        text = f"{directory}: site.key and signing.key made, mode 0600"
    output.as_json(report) if json else print(text)


@app.command("list")
def list_keys(
    store: Annotated[
        bool, typer.Option("--store", help="Also say how many checkpoints in the store each site key opens.")
    ] = False,
    json: Json = False,
) -> None:
    """Keys of this node by id, and who else can read new checkpoints. No secret is shown."""
    config = load()
    keys = access.site_keys(config)
    names = ["current", *("other" for _ in keys.site_keys[1:])]
    rows: list[dict[str, Any]] = [
        {"kind": "site", "id": key.key_id, "use": use} for key, use in zip(keys.site_keys, names, strict=True)
    ]
    following = Path(config.keys.others) / keyfiles.NEXT
    if following.exists():
        staged = keyfiles.load_site_key(following).key_id
        rows = [row | {"use": "next"} if row["id"] == staged and row["use"] == "other" else row for row in rows]
    rows += [
        {"kind": "signing", "id": key.key_id, "use": "trusted" if number else "own"}
        for number, key in enumerate(keys.trusted)
    ]
    found, problems = configured.of_site(config.keys)
    rows += [{"kind": "recipient", "id": r.key_id, "use": f"{r.method} {r.name}".strip()} for r in found]
    if store:
        count = asyncio.run(_count(keys))
        rows = [row | ({"checkpoints": count[row["id"]]} if row["kind"] != "signing" else {}) for row in rows]
        known = {row["id"] for row in rows}
        rows += [
            {"kind": "unknown", "id": key, "use": "not on this node", "checkpoints": number}
            for key, number in sorted(count.items())
            if key not in known
        ]
    if json:
        output.as_json({"type": "keys", "keys": rows, "problems": [p.as_dict() for p in problems]})
    else:
        headers = ("KIND", "ID", "USE", *(("CHECKPOINTS",) if store else ()))
        output.table(headers, [[str(row.get(h.lower(), "-")) for h in headers] for row in rows])
    for problem in problems:
        typer.echo(f"gpucr: warning: recipient not used: {problem}", err=True)


async def _count(keys: access.Keys) -> Counter[str]:
    async with access.opened(load(), keys, None) as (catalog, _):
        manifests = [entry.manifest for entry in await catalog.entries() if entry.manifest is not None]
    return Counter(str(slot.get("key_id")) for manifest in manifests for slot in manifest.slots)


@app.command("rotate")
def rotate(
    stage: Annotated[
        bool,
        typer.Option("--stage", help="Only make the next key, opened and not yet used. Copy it to every node."),
    ] = False,
    json: Json = False,
) -> None:
    """Take the staged site key for new checkpoints from now on; the old one stays readable.

    First `--stage` and a copy to every node, then this on every node, then `gpucr key rewrap --all` once.
    """
    keys = load().keys
    if stage:
        made = keyfiles.stage(keys.site, keys.others)
        report = {"type": "staged", "next": made, "file": f"{keys.others}/{keyfiles.NEXT}"}
        text = f"{keys.others}/{keyfiles.NEXT}: site key {made}; copy it to every node and restart the agents"
    else:
        old, new = keyfiles.rotate(keys.site, keys.others)
        report = {"type": "rotated", "old": old, "new": new}
        text = f"site key {new} is in use when the agent restarts; {old} is kept in {keys.others}"
    output.as_json(report) if json else print(text)


@app.command("rewrap")
def rewrap_checkpoints(
    checkpoints: Annotated[list[str] | None, typer.Argument(help="Checkpoint ids.")] = None,
    job: Annotated[str | None, typer.Option("--job", help="All checkpoints of a job.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints in the store.")] = False,
    add: Annotated[
        list[Path] | None, typer.Option("--add", help="PEM file with recipients who can read them from now on.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Key id of a recipient who loses his slot.")
    ] = None,
    checkpoint_dir: CheckpointDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    json: Json = False,
) -> None:
    """Seal the keys of existing checkpoints anew: for the current site key, and for other recipients. Root.

    No pack is read or written; the manifest is signed again and replaced as a whole.
    """
    if not (checkpoints or job or everything):
        raise UsageError(reason="which checkpoints? Give ids, --job or --all")
    new = [recipient for path in add or [] for recipient in recipients.parse(read_public(path), path)]
    wish = Wish(frozenset(checkpoints or ()), job, new, frozenset(remove or ()))
    results = asyncio.run(rewrap(load(), wish, checkpoint_dir, dry_run=dry_run))
    if json:
        output.as_json({"type": "rewrapped", "dry_run": dry_run, "checkpoints": [r.as_dict() for r in results]})
    else:
        output.table(("JOB", "CHECKPOINT", "RESULT"), [(r.job, r.checkpoint, r.text(dry_run)) for r in results])
    failed = [r.problem for r in results if r.problem is not None]
    if failed:
        raise failed[0]
