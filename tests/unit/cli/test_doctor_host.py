"""What `gpucr doctor` says of a host and of the store; what it looks at is real where that needs no cluster."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from site_sample import InProcess

from gpucr_hpc.cli import doctor_host, doctor_store
from gpucr_hpc.config import NetworkConfig, StoreConfig
from gpucr_hpc.errors import StoreError

GIB = 1 << 30


def test_a_limit_below_the_room_is_named() -> None:
    """The agent's worker would be ended in the middle of a checkpoint."""
    _, good, detail, advice = doctor_host.judge_memory(64 * GIB, 40 * GIB, 10 * GIB, 8 * GIB)
    assert (good, "10 GiB" in detail, "8 GiB" in detail) == (False, True, True)
    assert advice.startswith("MemoryMax=infinity")
    assert doctor_host.judge_memory(64 * GIB, 40 * GIB, 10 * GIB, 10 * GIB)[1]
    assert doctor_host.judge_memory(64 * GIB, 40 * GIB, 10 * GIB, None)[1]


def test_why_images_are_written_in_python_is_said() -> None:
    name, good, detail, _ = doctor_host.chunks("")
    assert (name, good, detail) == ("chunks", True, "/usr/lib/gpucr/libgpucr_chunks.so")
    assert doctor_host.chunks("OpenSSL 3.0 is slow for 2 processors")[1]
    _, good, detail, advice = doctor_host.chunks("/usr/lib/gpucr/libgpucr_chunks.so: cannot open shared object file")
    assert not good
    assert "cannot open" in detail
    assert "libssl-dev" in advice


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is missing"),
        ("", "Exec format error"),
        ("#!/bin/sh\necho gpucr-copier 1", "says 'gpucr-copier 1' instead of 'gpucr-copier 2'"),
        ("#!/bin/sh\necho libcrypto.so.3: not found >&2; exit 127", "says 'libcrypto.so.3: not found'"),
        ('#!/bin/sh\n[ "$1" = --version ] && echo gpucr-copier 2', ""),
    ],
)
def test_a_copier_that_cannot_be_used_is_said(tmp_path: Path, content: str | None, problem: str) -> None:
    """The agent would go without it, and only its log would say so."""
    program = tmp_path / "gpucr-copier"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    name, good, detail, advice = asyncio.run(doctor_host.copying(program))
    assert (name, good) == ("copier", not problem)
    assert problem in detail
    assert str(program) in detail
    assert advice.startswith("make -C spank_plugin install")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a network namespace)")
def test_a_congestion_control_that_the_kernel_has_not_is_named() -> None:
    for names in (("no such one", "reno"), ()):
        assert asyncio.run(doctor_host.network(NetworkConfig(congestion_control=names)))[1]
    _, good, detail, advice = asyncio.run(doctor_host.network(NetworkConfig(congestion_control=("no such one",))))
    assert not good
    assert detail.endswith("jobs may use no congestion control of no such one")
    assert '["reno"]' in advice


def test_small_pipes_are_named() -> None:
    """They cost time, each time a job is read."""
    _, good, detail, advice = doctor_host.pipes(1 << 20)
    assert (good, "1 MiB" in detail, "fs.pipe-max-size=8388608   # otherwise" in advice) == (False, True, True)
    assert doctor_host.pipes(8 << 20)[1]


@pytest.mark.parametrize(
    ("controllers", "name", "text", "limit"),
    [
        ("memory", "memory.limit_in_bytes", "4294967296", 4 * GIB),
        ("memory", "memory.limit_in_bytes", "9223372036854771712", None),
        ("", "memory.max", "max", None),
        ("", "memory.max", "1073741824", GIB),
        ("cpuset", "memory.limit_in_bytes", "1", None),
    ],
)
def test_limit_of_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str, name: str, text: str, limit: int | None
) -> None:
    """Version 1 and 2."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / name).write_text(text + "\n")
    monkeypatch.setattr(doctor_host.cgroup, "memberships", lambda _pid: {controllers: "/agent"})
    monkeypatch.setattr(doctor_host.cgroup, "mount_point", lambda _controllers: tmp_path)
    assert limit == doctor_host.memory_limit(7)
    assert doctor_host.memory_limit(None) is None


def test_control_groups_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None mounted, or one that lets nobody in."""
    monkeypatch.setattr(doctor_host.cgroup, "memberships", lambda _pid: {"memory": "/", "": "/x"})
    monkeypatch.setattr(doctor_host.cgroup, "mount_point", lambda _controllers: None)
    assert not doctor_host.control_groups()[1]
    monkeypatch.setattr(doctor_host.cgroup, "mount_point", lambda _controllers: tmp_path)
    (tmp_path / "cgroup.procs").touch()
    _, good, detail, _ = doctor_host.control_groups()
    assert (good, "memory; not to be written: version 2" in detail) == (False, True)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/cgroup.procs").touch()
    assert doctor_host.control_groups()[1]


def test_disk(tmp_path: Path) -> None:
    """A directory that the agent has yet to make is where it would be."""
    assert doctor_host.disk(f"{tmp_path}/run/gpucr", 1, "x")[1]
    _, good, detail, advice = doctor_host.disk(f"{tmp_path}/log", 1 << 62, "logs are lost")
    assert (good, detail.startswith(f"{tmp_path}/log: "), "logs are lost" in advice) == (False, True, True)


@pytest.mark.parametrize(
    ("files", "good", "words"),
    [
        ({"plugstack.conf": "optional {so} signal=50\n"}, True, "signal=50"),
        ({"plugstack.conf": "include d/*.conf\n", "d/a.conf": "# x\nrequired gpucr.so\n"}, True, "required gpucr.so"),
        ({"plugstack.conf": "# optional {so}\noptional other.so\n"}, False, "has no line with gpucr.so"),
        ({"plugstack.conf": "include plugstack.conf\n"}, False, "has no line"),
        ({}, False, "has no line"),
        ({"plugstack.conf": "optional /nowhere/gpucr.so\n"}, False, "no such file on this node"),
    ],
)
def test_plugin(tmp_path: Path, files: dict[str, str], good: bool, words: str) -> None:
    """Its line may be in a file that is included; the plugin may be named without its directory."""
    library = tmp_path / "lib/gpucr.so"
    library.parent.mkdir()
    library.touch()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.format(so=library))
    live = {"plugstackconfig": f"{tmp_path}/plugstack.conf", "plugindir": f"/x:{library.parent}"}
    _, found, detail, advice = doctor_host.plugin(live)
    assert (found, words in detail, "knows none of the options" in advice) == (good, True, True)


def test_the_trial_of_the_network_leaves_nothing() -> None:
    """What is missing is said in the words of the program that misses it."""
    if os.geteuid() != 0:
        _, good, detail, _ = asyncio.run(doctor_host.network(NetworkConfig()))
        assert (good, "cannot be made" in detail) == (False, True)
        return
    before = sorted(os.listdir("/sys/class/net"))
    asyncio.run(doctor_host.network(NetworkConfig()))
    assert sorted(os.listdir("/sys/class/net")) == before
    _, good, detail, _ = asyncio.run(doctor_host.network(NetworkConfig(vxlan_port=99999999)))
    assert (good, "cannot be made: " in detail) == (False, True)


def probe(**more: Any) -> dict[str, Any]:
    account = {"root": "/scratch/gpucr", "free_bytes": 4 * GIB, "seconds": 0.01, "bytes_per_s": 1e9}
    return account | {"owner": 0, "links": True} | more


def test_the_store() -> None:
    """Squashed root, little room, no hard links, a local directory: each with its line and cost."""
    config = StoreConfig(root="/scratch/gpucr")
    assert all(good for _, good, _, _ in doctor_store.judge(config, probe()))
    for more, words in (
        ({"owner": 65534}, "in [store], who owns /scratch/gpucr"),
        ({"free_bytes": 1 << 20}, "make room"),
        ({"links": False}, "written in full"),
    ):
        (bad,) = (line for line in doctor_store.judge(config, probe(**more)) if not line[1])
        assert (words in bad[3], "   # " in bad[3]) == (True, True)
    (bad,) = (line for line in doctor_store.judge(StoreConfig(), probe()) if not line[1])
    assert "looks local to this node" in bad[2]
    assert "squashed" in doctor_store.refused(config, StoreError(path="/scratch", reason="denied"))[1]
    assert "install -d -o gpucr" in doctor_store.refused(StoreConfig(user="gpucr"), StoreError(path="/", reason="x"))[1]


def test_what_the_worker_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial leaves nothing in the store, also where there are no hard links."""

    async def probed() -> dict[str, Any]:
        async with InProcess(str(tmp_path)) as worker:
            found: dict[str, Any] = await worker.call("probe")
            return found

    found = asyncio.run(probed())
    assert (found["owner"], found["links"]) == (os.geteuid(), True)

    def link(*_args: object, **_more: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "link", link)
    assert not asyncio.run(probed())["links"]
    assert list(tmp_path.iterdir()) == []


def test_kind_of_a_file_system() -> None:
    assert doctor_store.file_system("/proc/self") == "proc"
