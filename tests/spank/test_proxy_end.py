"""gpucr-srun when something ends, misbehaves or is not there: signals, shepherd, reader, strangers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time

import pytest

from gpucr_hpc.wire import Type

from .capsule_lab import LIMIT_S
from .proxy_lab import PROXY, ProxyLab, piece

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="spank_plugin is not built")


def test_reader_of_our_output_leaves(proxy: ProxyLab) -> None:
    """As with srun: the data is dropped, the tasks run on."""
    proxy.start("x")
    proxy.plan(1)
    assert proxy.run.stdout
    proxy.run.stdout.close()
    proxy.run.stdout = None
    task = proxy.task(0)
    for _ in range(100):
        task.out(b"x" * 60000)
    task.err(b"still\n")
    task.end()
    proxy.end()
    assert (0, b"", b"still\n") == proxy.finish()


def test_signals(proxy: ProxyLab) -> None:
    proxy.start("x")
    assert proxy.peer
    for s in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGUSR2,
    ):
        proxy.run.send_signal(s)
        told = proxy.peer.expect(Type.SRUNSIGNAL)
        assert (proxy.srun.get("KEY"), int(s)) == (told.get("KEY"), told.int("SIGNAL"))
    proxy.end(143 << 8)
    assert 143 == proxy.finish()[0]


def test_shepherd_dies(proxy: ProxyLab) -> None:
    proxy.start("x")
    proxy.plan(1)
    assert proxy.peer
    proxy.peer.close()
    assert (1, b"srun: error: gpucr: the capsule's shepherd is gone\n") == proxy.finish()[::2]


def test_shepherd_dies_after_the_end(proxy: ProxyLab) -> None:
    proxy.start("x")
    proxy.plan(1)
    task = proxy.task(0)
    proxy.end(3 << 8)
    assert proxy.peer
    proxy.peer.close()
    time.sleep(0.1)
    task.out(b"late\n")
    task.end()
    assert (3, b"late\n", b"") == proxy.finish()


def test_silent_task_is_not_waited_for(proxy: ProxyLab) -> None:
    proxy.start("x")
    proxy.plan(1, label=1)
    task = proxy.task(0)
    task.out(b"part")
    begin = time.monotonic()
    proxy.end(9)
    assert (137, b"0: part\n", b"") == proxy.finish()
    assert time.monotonic() - begin > 4


@pytest.mark.parametrize("what", ["token", "rank", "kind", "length", "twice", "long"])
def test_strangers_are_sent_away(proxy: ProxyLab, what: str) -> None:
    proxy.start("x")
    proxy.plan(1)
    good = proxy.task(0)
    good.out(b"good ")
    assert proxy.run.stdout
    assert b"good " == proxy.run.stdout.read(5)
    bad = socket.create_connection(("127.0.0.1", proxy.srun.int("PORT")), timeout=LIMIT_S)
    token = proxy.srun.get("TOKEN")
    hello = {
        "token": f"{'0' * 32} 1\n", "rank": f"{token} x\n", "twice": f"{token} 0\n",
        "long": f"{token} 11111111111111111",
    }.get(what, f"{token} 1\n").encode()  # fmt: skip
    bad.sendall(hello)
    if what == "kind":
        bad.sendall(piece(3, b"x"))
    elif what == "length":
        bad.sendall(b"\x01\xff\xff\xff\x7fabc")
    with contextlib.suppress(ConnectionResetError):
        assert b"" == bad.recv(100).removeprefix(piece(0))
    bad.close()
    good.out(b"still")
    good.end()
    proxy.end()
    assert (0, b"still", b"") == proxy.finish()


@pytest.mark.parametrize("env", [{}, {"GPUCR_CAPSULE": "1"}, {"GPUCR_SHEPHERD": "/x"}])
def test_outside_a_capsule_the_real_srun_runs(proxy: ProxyLab, env: dict[str, str]) -> None:
    """The next srun on PATH that is not this program."""
    first, second = proxy.dir / "a", proxy.dir / "b"
    first.mkdir()
    second.mkdir()
    os.symlink(PROXY, first / "srun")
    (second / "srun").write_text("#!/bin/sh\necho real $# $2\n")
    (second / "srun").chmod(0o755)
    run = subprocess.run(
        [first / "srun", "-n2", "a b"], env={"PATH": f"{first}:{second}:/bin", **env}, capture_output=True, check=True
    )
    assert (b"real 2 a b\n", b"") == (run.stdout, run.stderr)
    run = subprocess.run([PROXY], env={"PATH": f"{first}", **env}, capture_output=True)
    assert (1, b"srun: error: gpucr: not inside a protected job, and no other srun is on PATH\n") == (
        run.returncode,
        run.stderr,
    )
