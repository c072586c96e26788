"""Connections to services whose clients connect anew: they are hung up, others are let be."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr_hpc.engine import sockets

try:
    os.close(os.pidfd_open(os.getpid()))
except OSError:
    pytest.skip("no pidfd here", allow_module_level=True)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.create_server(str(tmp_path / "service"), family=socket.AF_UNIX) as server:
        yield server


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.socket(socket.AF_UNIX, server.type)
    client.connect(server.getsockname())
    return client, server.accept()[0]


def closing(end: socket.socket) -> threading.Thread:
    """What a service does when its client has gone."""

    def wait() -> None:
        assert end.recv(1) == b""
        end.close()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_stream_is_ended_when_the_service_has_closed(service: socket.socket, tmp_path: Path) -> None:
    client, end = connected(service)
    with client:
        thread = closing(end)
        assert sockets.hang_up([os.getpid()], [f"{tmp_path}/*"]) == [f"{tmp_path}/service"]
        thread.join()
        assert client.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            client.send(b"x")
        assert sockets.hang_up([os.getpid()], [f"{tmp_path}/*"]) == [], "it is closed"


def test_a_service_that_does_not_close(service: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it longer than for the rest."""
    monkeypatch.setattr(sockets, "_HANG_UP_LIMIT_S", 0.1)
    client, end = connected(service)
    with client, end:
        assert sockets.hang_up([os.getpid()], [f"{tmp_path}/*"]) == [f"{tmp_path}/service"]


def test_datagrams_have_no_receiver_any_more(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client,
    ):
        log.bind(str(tmp_path / "log"))
        client.connect(str(tmp_path / "log"))
        client.send(b"before")
        assert sockets.hang_up([os.getpid()], [str(tmp_path / "log")]) == [str(tmp_path / "log")]
        with pytest.raises(OSError, match="not connected"):
            client.send(b"after")
        client.connect(str(tmp_path / "log"))
        client.send(b"anew")
        assert [log.recv(100) for _ in range(2)] == [b"before", b"anew"]


def test_others_are_let_be(service: socket.socket, tmp_path: Path) -> None:
    """Of another path, without one, with an abstract one, and those of the network."""
    client, end = connected(service)
    one, other = socket.socketpair()
    with client, end, one, other, socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)):
        abstract.bind(f"\0{tmp_path}/service")
        abstract.listen()
        third, fourth = connected(abstract)
        with third, fourth:
            assert sockets.hang_up([os.getpid()], ["/elsewhere/*", f"{tmp_path}/serv"]) == []
            for here, there in ((client, end), (one, other), (third, fourth)):
                here.send(b"x")
                assert there.recv(1) == b"x"


def test_services_of_ones_own_are_no_services_outside(service: socket.socket) -> None:
    """This process is in the network namespace of the service: so is a job that is connected to itself."""
    client, end = connected(service)
    with client, end:
        numbers = [str(client.fileno()), str(end.fileno())]
        assert list(sockets.unsaved(os.getpid(), numbers)) == []


def test_a_process_that_has_ended() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert sockets.hang_up([pid], ["*"]) == []
    assert list(sockets.unsaved(pid, ["0"])) == []
