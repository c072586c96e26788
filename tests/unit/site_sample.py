"""A site in a temporary directory: keys, configuration, and a store with checkpoints."""

from __future__ import annotations

import io
import json
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpucr_hpc.cli import main
from gpucr_hpc.engine.worker import Worker
from gpucr_hpc.image.keyfiles import generate_keys, load_signing_key, load_site_key
from gpucr_hpc.image.keys import DataKey
from gpucr_hpc.image.manifest import decode, encode
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import Manifest
from gpucr_hpc.store.posix import PosixStore

JOB = "41"
IDS = [f"20261127T2325{n:02d}Z-0000" for n in range(4)]


@dataclass
class Site:
    """See module. keys: the data keys of the checkpoints by id, which no command may show."""

    root: Path
    keys: dict[str, DataKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generate_keys(self.root / "keys")
        self.config = self.root / "gpucr.toml"
        self.configure()
        self.store = PosixStore(self.root / "store")

    def configure(self, keys: str = "") -> None:
        lines = [
            f'[store]\nroot = "{self.root}/store"',
            f'[agent]\nrun_dir = "{self.root}/run"',
            f'[keys]\nsite = "{self.root}/keys/site.key"\nothers = "{self.root}/keys/site.d"',
            f'signing = "{self.root}/keys/signing.key"\ntrusted = "{self.root}/keys/trusted"',
        ]
        self.config.write_text("\n".join([*lines, keys]))

    def add(self, checkpoint: str, content: dict[str, bytes] | None = None, *, job: str = JOB, **meta: object) -> None:
        site = load_site_key(self.root / "keys/site.key")
        key = self.keys[checkpoint] = DataKey.generate(site.id_key(job))
        staging = self.store.begin(job, checkpoint)
        # One worker: of two equal chunks that are sealed at the same time both are written.
        writer = ImageWriter(staging.create, checkpoint=checkpoint, node_rank=0, key=key, node="n1", workers=1)
        for name, data in (content or {"inventory.img": b"x" * 100}).items():
            with writer.stream(name) as stream:
                stream.write(data)
        manifest = Manifest(
            checkpoint=checkpoint, job=job, uid=2001, gid=100, reason="demand", run=0, images=[writer.finish()],
            slots=[key.wrap(site, checkpoint)], meta={"ranks": [{"node": "n1"}], **meta},
        )  # fmt: skip
        staging.publish(encode(manifest, load_signing_key(self.root / "keys/signing.key")))

    def manifest(self, checkpoint: str, job: str = JOB) -> Manifest:
        trusted = [load_signing_key(self.root / "keys/signing.key").public]
        return decode(self.store.read_manifest(job, checkpoint), "manifest", trusted, job=job, checkpoint=checkpoint)

    def run(self, *args: object, status: int = 0) -> str:
        """What a command prints, with its error output where it fails as expected; its worker is a real process."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("GPUCR_CONFIG", str(self.config))
            patch.setattr(sys, "argv", ["gpucr", *map(str, args)])
            code = exit_code()
        assert status == code, err.getvalue() + out.getvalue()
        return out.getvalue() if status == 0 else out.getvalue() + err.getvalue()


class InProcess:
    """A worker without a process of its own; orders and answers go through JSON as ever."""

    def __init__(self, root: str) -> None:
        self._worker = Worker(socket.socket())
        self._worker._store = PosixStore(root)

    async def __aenter__(self) -> InProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker._control.close()

    async def call(self, verb: str, **fields: Any) -> Any:
        order = json.loads(json.dumps(fields))
        return json.loads(json.dumps(getattr(self._worker, f"do_{verb}")(**order)))


def exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
