"""Returns the memory of large blocks to the system, so that a server's memory does not grow with every larger batch."""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
"""The parameter of `mallopt`, from malloc.h of glibc."""
_LARGE_BYTES: Final = 4 * 2**20


def return_large_blocks() -> bool:
    """Let malloc map each block of at least 4 MiB by itself and unmap it when it is freed; returns whether malloc can.

    By default, glibc raises this limit to the size of the largest block that was freed, up to 32 MiB. Tensors of batches of
    different sizes then come from the heap, whose free space cannot be returned if anything above it is in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) == 1
