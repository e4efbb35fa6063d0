"""Parses durations in a config."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")


def parse_duration(value: float | str) -> float:
    """Seconds of a duration: a number of seconds, or `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS` as in Slurm.

    Raises:
        ValueError: The value is not a duration or is not positive.
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, str) and match is None:
        raise ValueError(f"{value!r} is not a duration: give seconds, or MM:SS, HH:MM:SS or D-HH:MM:SS, such as 03:50:00")
    if match is None:
        seconds = float(value)
    else:
        days, hours, minutes = (int(match[name] or 0) for name in ("days", "hours", "minutes"))
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + float(match["seconds"])
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{value!r} is not a duration: it must be positive")
    return seconds
