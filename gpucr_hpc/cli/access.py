"""A store opened by the command line itself, without the agent: by root with the site's keys, or by a recipient of its
checkpoints with a private key of his own.

The store is reached through a worker, as the agent does it: as the store's account when root asks, else as who asks.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc.agent.catalog import Catalog, Entry
from gpucr_hpc.config import Config
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import CheckpointMissing, KeyFileError
from gpucr_hpc.image.keyfiles import (
    load_public_key,
    load_public_keys,
    load_signing_key,
    load_site_keys,
    load_trusted,
    read_secret,
)
from gpucr_hpc.image.keys import DataKey, PublicKey, SiteKey
from gpucr_hpc.image.recipients import Opener
from gpucr_hpc.model import Manifest

_MAX_SECRET_BYTES = 64 << 10


@dataclass(frozen=True)
class Keys:
    """What opens checkpoints here. opener: a recipient's private key, which goes before the site's keys."""

    trusted: list[PublicKey]
    site_keys: tuple[SiteKey, ...]
    opener: Opener | None = None

    def data_key(self, manifest: Manifest) -> DataKey:
        """The key of a checkpoint. Raises WrongKey, IntegrityError."""
        if self.opener is not None:
            return self.opener.unwrap(manifest.slots, manifest.checkpoint)
        return DataKey.unwrap(manifest.slots, self.site_keys, manifest.checkpoint)


def site_keys(config: Config) -> Keys:
    """The keys of this node; root's. Raises KeyFileError."""
    signing = load_signing_key(config.keys.signing)
    return Keys(load_trusted(config.keys.trusted, signing), load_site_keys(config.keys.site, config.keys.others))


def recipient_keys(config: Config, key: str, passphrase: str | None, signer: Path | None) -> Keys:
    """The private key of a recipient. key, passphrase: paths of files, or fd:N. signer: public half of the signing key,
    where the node's own cannot be read. Raises KeyFileError."""
    word = None if passphrase is None else secret(passphrase).rstrip(b"\n")
    opener = Opener(secret(key), key, word)
    trusted = (
        [load_public_key(signer)] if signer is not None else load_public_keys(config.keys.trusted, config.keys.signing)
    )
    return Keys(trusted, (), opener)


def secret(source: str) -> bytes:
    """Content of a file of mode 0600, or of an open descriptor named fd:N. Raises KeyFileError."""
    if not source.startswith("fd:"):
        return read_secret(source)
    try:
        with open(int(source.removeprefix("fd:")), "rb", closefd=False) as file:
            return file.read(_MAX_SECRET_BYTES)
    except (OSError, ValueError):
        raise KeyFileError(path=source, reason="is not an open descriptor") from None


@asynccontextmanager
async def opened(config: Config, keys: Keys, root: str | None) -> AsyncIterator[tuple[Catalog, WorkerClient]]:
    """The checkpoints of a store. root: None means the site's."""
    where = root or config.store.root
    if os.geteuid() == 0 and where == config.store.root:
        client = WorkerClient.for_user(where, config.store.user)
    else:
        owner = os.stat(where) if os.geteuid() == 0 and os.path.isdir(where) else None
        client = WorkerClient(where, owner.st_uid if owner else os.geteuid(), owner.st_gid if owner else os.getegid())
    async with client as worker:
        yield Catalog(keys, worker, where), worker


def find(entries: list[Entry], checkpoint: str, root: str) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointMissing, or why it cannot be trusted."""
    for entry in entries:
        if entry.checkpoint == checkpoint:
            if entry.manifest is None:
                raise entry.problem or CheckpointMissing(checkpoint=checkpoint, path=root)
            return entry.manifest
    raise CheckpointMissing(checkpoint=checkpoint, path=root)
