"""What every part of an agent needs: configuration, keys, this node's name and CRIU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpucr_hpc.agent.peers import Connector
from gpucr_hpc.config import Config
from gpucr_hpc.engine.criu import CriuInfo
from gpucr_hpc.engine.worker_client import WorkerClient
from gpucr_hpc.errors import GpucrError, PermissionRefused
from gpucr_hpc.image.keys import PublicKey, SigningKey, SiteKey


@dataclass(frozen=True)
class Context:
    """Read once at the agent's start. site_keys: first the one for new checkpoints. criu: None when this host cannot
    checkpoint; `criu_problem` says why."""

    config: Config
    node: str
    site_keys: tuple[SiteKey, ...]
    signing_key: SigningKey
    trusted: list[PublicKey]
    criu: CriuInfo | None
    criu_problem: GpucrError | None
    connector: Connector

    def store_root(self, wanted: str) -> str:
        """The store of a job: the site's, or the user's own directory below an allowed root.

        Symbolic links are resolved before the comparison; the worker opens the directory as the user, so a link
        put in place later gives a user nothing that he could not do himself. Raises PermissionRefused.
        """
        if not wanted:
            return self.config.store.root
        resolved = os.path.realpath(wanted)
        for root in self.config.store.allowed_roots:
            if Path(resolved).is_relative_to(os.path.realpath(root)):
                return resolved
        allowed = ", ".join(self.config.store.allowed_roots) or "none configured"
        raise PermissionRefused(who="--checkpoint-dir", action=f"be {wanted}: allowed are directories below {allowed}")

    def worker(self, root: str, uid: int, gid: int) -> WorkerClient:
        """A worker for a store: the store's account writes the site's, the job's user his own."""
        if root == self.config.store.root:
            return WorkerClient.for_user(root, self.config.store.user)
        return WorkerClient(root, uid, gid)
