"""A capsule is ended at any moment of its own end: a job often ends while its agent begins to remove it."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from gpucr_hpc.capsule import capsule as module
from gpucr_hpc.capsule.capsule import Capsule
from gpucr_hpc.capsule.processes import start_time


def capsule_of(child: subprocess.Popen[bytes]) -> Capsule:
    return Capsule("1", 0, os.getuid(), os.getgid(), child.pid, start_time(child.pid) or 0, 2)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


@pytest.mark.parametrize("moment", ["before", "after alive", "after pidfd_open", "after start_time", "never"])
def test_init_ends_by_itself_while_it_is_killed(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        capsule = capsule_of(child)
        alive, opened, started = Capsule.alive, os.pidfd_open, module.start_time

        def ended_after(name, function):
            def call(*arguments):
                result = function(*arguments)
                if moment == name:
                    end(child)
                return result

            return call

        monkeypatch.setattr(Capsule, "alive", ended_after("after alive", alive))
        monkeypatch.setattr(os, "pidfd_open", ended_after("after pidfd_open", opened))
        if moment == "before":
            end(child)
        elif moment == "after start_time":  # alive() asks for it, too: only what comes after that counts
            monkeypatch.setattr(Capsule, "alive", lambda _: True)
            monkeypatch.setattr(module, "start_time", ended_after("after start_time", started))
        asyncio.run(capsule.kill())
        child.wait()  # a zombie until then, so nobody else can have got its number
        assert child.returncode == -9
