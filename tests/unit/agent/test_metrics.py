"""The figures for Prometheus, as text and over HTTP."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

from gpucr_hpc.agent import metrics
from gpucr_hpc.agent.metrics import Metrics

_LINE = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{(\w+="([^"\\\n]|\\.)*",?)+\})? [0-9.e+-]+)')


def filled() -> Metrics:
    found = Metrics()
    found.checkpoint("interval", {"bytes_stored": 100, "total_s": 1.5, "freeze_s": 0.25})
    found.checkpoint("interval", {"bytes_stored": 50, "total_s": 0.5, "freeze_s": 0.25})
    found.checkpoint("drain", None)
    found.restore(2.0)
    found.restore(None)
    return found


def test_text():
    """Every line has Prometheus' form, and sums are sums."""
    jobs = [SimpleNamespace(job="7", phase="running", last={"began": 12.0}), SimpleNamespace(phase="running", last={})]
    lines = filled().text(jobs).splitlines()
    assert [] == [line for line in lines if not _LINE.fullmatch(line)]
    for line in (
        'gpucr_checkpoints_total{reason="interval",result="good"} 2',
        'gpucr_checkpoints_total{reason="drain",result="failed"} 1',
        "gpucr_checkpoint_bytes_total 150",
        "gpucr_freeze_seconds_total 0.5",
        'gpucr_restores_total{result="failed"} 1',
        "gpucr_restore_seconds_total 2",
        'gpucr_jobs{phase="running"} 2',
        'gpucr_last_checkpoint_timestamp_seconds{job="7"} 12',
    ):
        assert line in lines


def test_label_values_are_escaped():
    found = Metrics()
    found.add("gpucr_checkpoints_total", reason='a"b\\c\nd')
    assert r'gpucr_checkpoints_total{reason="a\"b\\c\nd"} 1' in found.text([])


def test_served_over_http():
    """GET /metrics gives the text, anything else 404; a request that is none breaks nothing."""

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    async def run() -> list[bytes]:
        server = await metrics.serve(0, lambda: "x 1\n")
        port = server.sockets[0].getsockname()[1]
        requests = (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40000, b"")
        answers = [await ask(port, request) for request in requests]
        server.close()
        return answers

    good, other, *broken = asyncio.run(run())
    assert good.startswith(b"HTTP/1.1 200 ")
    assert good.endswith(b"\r\n\r\nx 1\n")
    assert other.startswith(b"HTTP/1.1 404 ")
    assert [b"", b""] == broken
