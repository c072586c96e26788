"""New key slots for existing checkpoints; nothing else of them changes."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass
from typing import Any

from gpucr_hpc.agent.catalog import Entry
from gpucr_hpc.cli import access
from gpucr_hpc.config import Config
from gpucr_hpc.errors import CheckpointMissing, GpucrError
from gpucr_hpc.image import manifest as manifest_file
from gpucr_hpc.image.keyfiles import load_signing_key
from gpucr_hpc.image.keys import SLOT_TYPE_SITE, DataKey, SiteKey
from gpucr_hpc.image.recipients import Recipient
from gpucr_hpc.model import Json, Manifest


@dataclass(frozen=True)
class Wish:
    """Which checkpoints (ids; those of a job; without both, all), and who is to get or to lose a slot."""

    checkpoints: frozenset[str]
    job: str | None
    add: list[Recipient]
    remove: frozenset[str]

    def wants(self, entry: Entry) -> bool:
        return not self.checkpoints or entry.checkpoint in self.checkpoints


@dataclass(frozen=True)
class Result:
    """What became of one checkpoint. recipients: key ids after it."""

    job: str
    checkpoint: str
    changed: bool
    recipients: list[str]
    problem: GpucrError | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "checkpoint": self.checkpoint,
            "changed": self.changed,
            "recipients": self.recipients,
            "problem": None if self.problem is None else str(self.problem),
        }

    def text(self, dry_run: bool) -> str:
        if self.problem is not None:
            return str(self.problem)
        word = ("would be rewrapped" if dry_run else "rewrapped") if self.changed else "unchanged"
        return f"{word}: {', '.join(self.recipients)}"


def new_slots(manifest: Manifest, key: DataKey, site: SiteKey, wish: Wish) -> list[Json]:
    """The slots of a checkpoint after a wish: one for the current site key, those of others less the removed, new ones.

    A slot that is right as it is stays the same, so that nothing changes where nothing has to.
    """
    kept = {
        str(slot.get("key_id")): slot
        for slot in manifest.slots
        if slot.get("type") != SLOT_TYPE_SITE and slot.get("key_id") not in wish.remove
    }
    for recipient in wish.add:
        kept.setdefault(recipient.key_id, recipient.wrap(key, manifest.checkpoint))
    own = [s for s in manifest.slots if s.get("type") == SLOT_TYPE_SITE and s.get("key_id") == site.key_id]
    return [own[0] if own else key.wrap(site, manifest.checkpoint), *kept.values()]


async def rewrap(config: Config, wish: Wish, root: str | None, *, dry_run: bool) -> list[Result]:
    """Do it, one checkpoint after another; a damaged or unreadable one is reported and left as it is.

    Raises KeyFileError, CheckpointMissing (an id that is not there).
    """
    keys, signing = access.site_keys(config), load_signing_key(config.keys.signing)
    results = []
    async with access.opened(config, keys, root) as (catalog, worker):
        entries = [entry for entry in await catalog.entries(wish.job) if wish.wants(entry)]
        missing = wish.checkpoints - {entry.checkpoint for entry in entries}
        if missing:
            raise CheckpointMissing(checkpoint=sorted(missing)[0], path=root or config.store.root)
        for entry in entries:
            try:
                if entry.manifest is None:
                    raise entry.problem or CheckpointMissing(checkpoint=entry.checkpoint, path=entry.job)
                old = entry.manifest
                slots = new_slots(old, keys.data_key(old), keys.site_keys[0], wish)
                changed = slots != old.slots
                data = manifest_file.encode(dataclasses.replace(old, slots=slots), signing)
                if changed and not dry_run:
                    await worker.call(
                        "replace_manifest",
                        job=entry.job,
                        checkpoint=entry.checkpoint,
                        old=base64.b64encode(entry.data).decode(),
                        new=base64.b64encode(data).decode(),
                    )
                ids = [str(slot.get("key_id")) for slot in slots]
                results.append(Result(entry.job, entry.checkpoint, changed, ids))
            except GpucrError as error:
                results.append(Result(entry.job, entry.checkpoint, False, [], error))
    return results
