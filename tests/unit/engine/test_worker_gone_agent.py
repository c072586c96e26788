"""A worker whose agent goes away while it seals."""

from __future__ import annotations

import json
import os
import socket
import threading

from gpucr_hpc.engine import stream
from gpucr_hpc.engine.worker import Worker
from gpucr_hpc.image import packs, writer
from gpucr_hpc.image.chunks import CHUNK_BYTES
from gpucr_hpc.image.files import default_workers
from gpucr_hpc.image.keys import DataKey, SiteKey
from gpucr_hpc.wire import send_record

JOB, ID = "41", "20261127T232501Z-3f9a"
LIMIT_S = 20


def test_what_nobody_will_publish_is_not_sealed_to_its_end(tmp_path, monkeypatch):
    """It stops at the chunk that it is at, and removes what there is."""
    reached, gone, stored = threading.Event(), threading.Event(), []
    store = packs.Packs.store

    def slow(files, pieces):
        stored.append(pieces)
        reached.set()
        assert gone.wait(LIMIT_S)
        return store(files, pieces)

    give_up = writer.ImageWriter.give_up

    def given_up(image):
        give_up(image)
        gone.set()

    monkeypatch.setattr(packs.Packs, "store", slow)
    monkeypatch.setattr(writer.ImageWriter, "give_up", given_up)
    key = DataKey.generate(SiteKey(b"s" * 32).id_key(JOB))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    worker = Worker(theirs)
    worker.do_open(str(tmp_path / "store"), 0, 0, listen=str(tmp_path), name=stream.CAPTURE_SOCKET)
    room = 40 * CHUNK_BYTES
    worker.do_capture(JOB, ID, 0, key.reveal_hex(), begin=True, packs=2, room_bytes=room, expected_bytes=room)
    with worker._writer.stream("core-1.img") as file:
        file.write(os.urandom(30 * CHUNK_BYTES))
    work = threading.Thread(target=worker.run, daemon=True)
    work.start()
    send_record(ours, json.dumps({"do": "seal"}).encode())
    assert reached.wait(LIMIT_S)
    ours.close()
    work.join(LIMIT_S)
    assert not work.is_alive()
    assert len(stored) <= default_workers()
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    theirs.close()
