"""Checkpoints of GPU jobs with a driver that has no card (tests/gpu/fakes.py): a trial (trial_tree.py)."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from tests.cluster.trial_tree import main, say
from tests.gpu import base, fakes

_CASES = (fakes.fake_all, fakes.fake_threads, fakes.fake_copies)


async def trial() -> None:
    """Each case that fits, in a place of its own."""
    names = {case.work: name for name, case in base.CASES.items()}
    for work in _CASES:
        place = base.Place(Path("/bench/gpu"), "criu", names[work])
        place.cuda(stop_threads=True)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = await work(place, argparse.Namespace())
            say(work.__name__, {"found": found, "failed": ""})
        except Exception as error:
            say(work.__name__, {"found": {}, "failed": repr(error)})
        finally:
            await place.close()


if __name__ == "__main__":
    main(trial)
