"""Whether a checkpoint will fit is decided before the job is frozen."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from site_sample import IDS, JOB, InProcess, Site

from gpucr_hpc.agent.participant import _RESERVE_BYTES, LocalParticipant
from gpucr_hpc.errors import StoreFull
from gpucr_hpc.image.keyfiles import load_signing_key, load_site_keys

MIB = 1 << 20


class Small(InProcess):
    """A store on a file system with so much space, of which each checkpoint takes `each` bytes."""

    def __init__(self, site: Site, total: int, each: int) -> None:
        super().__init__(site.store.location)
        self._site, self._total, self._each = site, total, each

    async def call(self, verb: str, **fields: Any) -> Any:
        if verb == "space":
            return self._total - self._each * len(self._site.store.list())
        return await super().call(verb, **fields)


def make_room(site: Site, resident: int, *, total: int, each: int = MIB, rank: int = 0, nodes: int = 1) -> None:
    signing = load_signing_key(site.root / "keys/signing.key")
    keys = load_site_keys(site.root / "keys/site.key", site.root / "keys/site.d")
    context = SimpleNamespace(trusted=[signing.public], site_keys=keys)
    part = LocalParticipant.__new__(LocalParticipant)
    part._job = SimpleNamespace(
        job=JOB, context=context, store_root=site.store.location, geometry=SimpleNamespace(nodes=["n"] * nodes)
    )
    part._capsule = SimpleNamespace(node_rank=rank)

    async def run() -> None:
        async with Small(site, total + _RESERVE_BYTES, each) as part._worker:
            await part._make_room(resident, full=True)

    asyncio.run(run())


def left(site: Site) -> list[str]:
    return [checkpoint for _, checkpoint in site.store.list(JOB)]


def test_first_checkpoint_hopes_for_compression(site):
    """A quarter of the memory must fit; what is said when it does not has all numbers."""
    make_room(site, 400 * MIB, total=100 * MIB)
    with pytest.raises(StoreFull, match=r"about 164 MiB needed \(if memory compresses well\); the job holds 400 MiB"):
        make_room(site, 400 * MIB, total=99 * MIB)


def test_estimate_goes_by_the_last_checkpoint(site):
    """Memory that did not compress then will not now: refused before the freeze, not in the middle of it."""
    site.add(IDS[0], {"pages-1.img": random.Random(1).randbytes(MIB)})
    make_room(site, 100 * MIB, total=103 * MIB)
    with pytest.raises(StoreFull, match="by its last checkpoint"):
        make_room(site, 100 * MIB, total=50 * MIB)
    assert [IDS[0]] == left(site), "the newest good one stays in any case"


def test_older_checkpoints_give_way(site):
    """Down to the newest good one, and only where space is needed."""
    for checkpoint in IDS[:3]:
        site.add(checkpoint, {"zero.img": bytes(MIB)})
    make_room(site, 0, total=3 * MIB)
    assert IDS[:3] == left(site)
    make_room(site, 0, total=3 * MIB - 1, each=MIB)
    assert [IDS[2]] == left(site)


def test_lead_counts_all_nodes_and_alone_removes(site):
    """The lead multiplies by the number of nodes; another node refuses, and removes nothing."""
    make_room(site, 100 * MIB, total=25 * MIB)
    with pytest.raises(StoreFull):
        make_room(site, 100 * MIB, total=25 * MIB, nodes=2)
    make_room(site, 100 * MIB, total=25 * MIB, nodes=2, rank=1)
    site.add(IDS[0])
    site.add(IDS[1])
    with pytest.raises(StoreFull):
        make_room(site, 10**6 * MIB, total=0, rank=1)
    assert IDS[:2] == left(site)
