"""When a checkpoint by the clock is due, and a job's own word about its progress."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr_hpc import wire
from gpucr_hpc.agent import clock
from gpucr_hpc.agent.clock import Times, margin_s
from gpucr_hpc.agent.policy import Policy, cut_short, policy_of
from gpucr_hpc.agent.report import parse_progress, read_line
from gpucr_hpc.config import AgentConfig
from gpucr_hpc.engine.openfiles import FilesPolicy
from gpucr_hpc.errors import Busy, DumpFailed, UsageError

SITE = AgentConfig(checkpoint_interval="1h", checkpoint_interval_min="5m", timeout_rounds=10)


def hello(interval: str = "", **options: str) -> wire.Frame:
    return wire.make(wire.Type.HELLO, ("OPTION", [f"{k}={v}" for k, v in options.items()]), INTERVAL=interval)


def test_interval():
    assert not Times(mark=100).interval_due(0, 1e9)
    assert not Times(mark=100).interval_due(60, 159)
    assert Times(mark=100).interval_due(60, 160)


def test_times_of_an_agent_with_other_fields():
    assert Times.from_dict({"run": 3, "mark": 5.0, "of a later release": 1}) == Times(run=3, mark=5.0)


def test_time_limit():
    """Not before the margin, not twice, and never before half of the time."""
    times = Times(began=0, end=1000)
    assert not times.limit_due(60, 939)
    assert times.limit_due(60, 940)
    assert not Times(began=0, end=1000, retry=990).limit_due(60, 980)
    assert not Times(began=0, end=1000, last_word=True).limit_due(60, 999)
    assert not Times(began=0, end=60).limit_due(60, 29)
    assert Times(began=0, end=60).limit_due(60, 30)
    assert not Times(began=0, end=0).limit_due(60, 1e9), "without a limit"


def test_margin_has_the_last_dump_in_it():
    assert margin_s(60, {}) == 60
    assert margin_s(60, {"dump_s": 100}) == 260


def test_slurmctld_is_asked_more_often_near_the_end():
    assert Times().question_due(1000)
    assert not Times(asked=1000, end=9000).question_due(1200)
    assert Times(asked=1000, end=9000).question_due(1300)
    assert Times(asked=1000, end=1800).question_due(1030)


def test_policy_of_site_and_user():
    assert policy_of(hello(), SITE) == Policy(interval_s=3600, rounds=10)
    assert policy_of(hello(io_uring="hide"), SITE).hide_io_uring
    assert policy_of(hello(), AgentConfig(io_uring="hide")).hide_io_uring
    assert not policy_of(hello(io_uring="keep"), AgentConfig(io_uring="hide")).hide_io_uring
    assert policy_of(hello("1s"), SITE).interval_s == 300
    assert policy_of(hello("0"), SITE).interval_s == 0
    wanted = policy_of(hello("30m", files="keep", timeout="yes", rounds="3"), SITE)
    assert wanted == Policy(1800, FilesPolicy.KEEP, on_timeout=True, rounds=3)
    assert policy_of(hello(rounds="99"), SITE).rounds == 10
    assert policy_of(hello(rounds="0", timeout="yes"), SITE).rounds == 0


def test_the_user_is_told_when_he_gets_less():
    """Not where the site's own default, or nothing at all, was raised or asked for."""
    for silent in (hello(), hello("0"), hello("5m"), hello("1h", rounds="10"), hello(rounds="0")):
        assert "" == cut_short(silent, SITE)
    assert "the site's shortest interval is 5m: it is taken" == cut_short(hello("90s"), SITE)
    assert "the site allows 10 rounds of --checkpoint-on-timeout: they are taken" == cut_short(hello(rounds="11"), SITE)


@pytest.mark.parametrize("options", [{"files": "undo"}, {"rounds": "many"}])
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError):
        policy_of(hello(**options), SITE)


def test_policy_survives_the_journal():
    policy = Policy(60, FilesPolicy.REFUSE, on_timeout=True, rounds=2)
    assert Policy.from_dict(policy.as_dict()) == policy
    assert Policy.from_dict({"interval_s": 60, "unheard_of": 1}) == Policy(60)


@pytest.mark.parametrize("line", ["", "half", "5", "-1 10", "11 10", "0 0", "1 nan", "1 inf", "a b"])
def test_what_is_no_progress(line):
    assert parse_progress(line, None, 0) is None


def test_progress():
    """Percent, and the time left by the program's own word, else from two looks."""
    own = parse_progress("250 1000 90.5", None, 0)
    assert own is not None
    assert own.as_dict() == {"done": 250, "total": 1000, "percent": 25, "left_s": 90.5}
    assert parse_progress("250 1000", None, 50).left_s is None
    assert parse_progress("250 1000", (0, 150), 50).left_s == 375


def test_only_a_regular_file_is_read(tmp_path):
    """No link is followed, and a pipe holds nobody up."""
    real = tmp_path / "real"
    real.write_text("1 2\nmore\n")
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo")
    assert read_line(str(real)) == "1 2"
    assert read_line(str(tmp_path / "link")) is None
    assert read_line(str(tmp_path / "fifo")) is None
    assert read_line(str(tmp_path / "none")) is None


class Checkpoints:
    """lead.checkpoint, which fails in turn as it is told, and the one job of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: Exception | None) -> None:
        self.failures, self.taken, self.said = list(failures), [], []  # type: list[Exception | None], list[bool], list[str]
        info = SimpleNamespace(running=True, being_preempted=False, end_time=1000)
        monkeypatch.setattr(clock, "lead", SimpleNamespace(checkpoint=self.checkpoint))
        monkeypatch.setattr(clock, "slurm", SimpleNamespace(job=lambda _job: asyncio.sleep(0, info)))
        self.job: Any = SimpleNamespace(
            job="7", times=Times(end=1000), policy=Policy(on_timeout=True, rounds=1), timeouts=1, tell=self.tell,
            save=lambda: None, context=SimpleNamespace(config=SimpleNamespace(agent=SITE)),
        )  # fmt: skip

    async def tell(self, message: str) -> None:
        self.said.append(message)

    async def checkpoint(self, _job: Any, _reason: str, *, leave: bool, **_more: Any) -> None:
        failure = self.failures.pop(0)
        if failure is not None:
            raise failure
        self.taken.append(leave)

    def limit_comes(self) -> None:
        asyncio.run(clock.Clock({})._leave(self.job))


def test_last_checkpoint_before_the_end_is_tried_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by the clock is under way, then one fails: the job shall not end without it; its user is told once."""
    busy, failed = Busy(job="7", operation="checkpointing"), DumpFailed(reason="x", log="x")
    seen = Checkpoints(monkeypatch, busy, failed, None)
    for _ in range(3):
        assert not seen.job.times.last_word
        seen.limit_comes()
    assert (seen.taken, len(seen.said), seen.job.times.last_word) == ([False], 1, True)
    assert not seen.job.times.limit_due(60, 999)


def test_a_fault_of_ours_is_no_reason_to_freeze_the_job_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a program that the node lacks."""
    seen = Checkpoints(monkeypatch, FileNotFoundError("tar"), FileNotFoundError("tar"))
    seen.limit_comes()
    assert seen.job.times.retry > time.time()
    asyncio.run(clock.Clock({})._periodic(seen.job))
    assert not seen.job.times.interval_due(3600, time.time())
    assert seen.taken == []
