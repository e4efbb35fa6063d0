"""Sizes in bytes as users write and read them, and the memory of this machine."""

from __future__ import annotations

import re
from typing import Final

import psutil

from rl_core.errors import UserError

_UNITS: Final = {"MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}


def available_memory() -> int:
    """Bytes that processes can use on this machine now, without those that others use."""
    return int(psutil.virtual_memory().available)


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as `80GiB`.

    Raises:
        UserError: It is not a positive number with a unit.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(matched.group(2).upper()) if matched else None
    if matched is None or unit is None or float(matched.group(1)) == 0:
        raise UserError(f"{option} {text} is not a size. Write a number with MiB, GiB, MB or GB: {option} 24GiB.")
    return int(float(matched.group(1)) * unit)


def format_size(num_bytes: float) -> str:
    """A size in the largest binary unit in which it is at least 1, such as `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
