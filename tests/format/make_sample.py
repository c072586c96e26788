"""Write the sample checkpoint that every later release must still read.

Run once per format version, from the root of the repository: PYTHONPATH=. python tests/format/make_sample.py.
It refuses to replace a sample: a released one is never made again. The keys beside it are for tests only.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from gpucr_hpc.image.base import Base
from gpucr_hpc.image.keys import DataKey, SigningKey, SiteKey
from gpucr_hpc.image.manifest import encode
from gpucr_hpc.image.reader import ImageReader
from gpucr_hpc.image.writer import ImageWriter
from gpucr_hpc.model import FORMAT_VERSION, Manifest
from gpucr_hpc.store.posix import PosixStore

HERE = Path(__file__).resolve().parent
JOB, CHECKPOINT = "41", "20261127T232501Z-3f9a"
#: From version 2 on a sample has a second checkpoint, which refers to the first one.
LATER = "20261128T001500Z-0001"
SITE_HEX = "11" * 32
SIGNING_HEX = "22" * 32


def sample_contents(node_rank: int, checkpoint: str = CHECKPOINT) -> dict[str, bytes]:
    """What the sample holds: all kinds of chunk, a stream of two chunks, an empty one."""
    noise = bytes((i * i * 31 + i // 7 * 131 + node_rank) & 0xFF for i in range(600))
    return {
        "inventory.img": b"node rank %d\n" % node_rank,
        "empty.img": b"",
        "pages-1.img": bytes(1 << 20) + b"page of text " * 9000,
        "zero.img": bytes(70000),
        "noise.img": noise,
        **({"later.img": b"only in the later one"} if checkpoint == LATER else {}),
    }


def main() -> None:
    """Write tests/format/sample-v<version>/."""
    root = HERE / f"sample-v{FORMAT_VERSION}"
    if root.exists():
        sys.exit(f"{root} is there already and must stay as it is")
    site, signing = SiteKey(bytes.fromhex(SITE_HEX)), SigningKey(bytes.fromhex(SIGNING_HEX))
    earlier: dict[int, ImageReader] = {}
    store = PosixStore(root)
    for checkpoint in (CHECKPOINT, LATER):
        staging = store.begin(JOB, checkpoint)
        key = DataKey.generate(site.id_key(JOB))
        images = []
        for rank in range(2):
            base = None
            if rank in earlier:
                base = Base(earlier[rank], functools.partial(staging.link, CHECKPOINT), staging.remove)
            writer = ImageWriter(
                staging.create, checkpoint=checkpoint, node_rank=rank, key=key, node=f"n{rank + 1}", base=base
            )
            for name, data in sample_contents(rank, checkpoint).items():
                with writer.stream(name) as stream:
                    stream.write(data)
            images.append(writer.finish())
        manifest = Manifest(
            checkpoint=checkpoint,
            job=JOB,
            uid=1000,
            gid=1000,
            created="2026-11-27T23:25:01Z",
            reason="preempt",
            run=0,
            images=images,
            slots=[key.wrap(site, checkpoint)],
            meta={"criu": "4.2.1"},
        )
        staging.publish(encode(manifest, signing))
        if checkpoint == CHECKPOINT:
            for entry in images:
                earlier[entry.node_rank] = ImageReader(
                    lambda name: store.open(JOB, CHECKPOINT, name), entry, checkpoint=CHECKPOINT, key=key
                )
    (root / "TEST-ONLY-site.key").write_text(SITE_HEX + "\n")
    (root / "TEST-ONLY-signing.pub").write_text(signing.public.raw.hex() + "\n")


if __name__ == "__main__":
    main()
