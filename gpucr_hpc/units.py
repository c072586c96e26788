"""Durations and sizes as people write them."""

from __future__ import annotations

import re

from gpucr_hpc.errors import UsageError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_IEC = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "90", "90s", "5m", "1h", "2d" or "1h30m".

    Raises UsageError for anything else.
    """
    total, end = 0.0, 0
    for part in _DURATION.finditer(text.strip()):
        if part.start() != end:
            break
        total += float(part[1]) * _SECONDS[part[2]]
        end = part.end()
    if not text.strip() or end != len(text.strip()):
        raise UsageError(reason=f"{text!r} is not a duration; write 90s, 5m, 1h30m or 2d")
    return total


def format_bytes(size_bytes: int) -> str:
    """A size in IEC units with three significant digits, for people only."""
    value = float(size_bytes)
    for unit in _IEC:
        if value < 1024 or unit == _IEC[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """A duration for people: 0.26 s, 41 s, 5 min 3 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {s} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
