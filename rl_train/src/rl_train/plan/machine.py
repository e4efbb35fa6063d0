"""How much memory this machine has."""

from __future__ import annotations

import psutil


def available_memory() -> int:
    """Bytes that processes can use on this machine now, without those that others use."""
    return int(psutil.virtual_memory().available)
