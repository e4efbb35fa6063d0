"""Returns the memory of large freed blocks to the system, so that a process does not keep the sum of its phases."""

from __future__ import annotations

import ctypes
from typing import Final

from rl_core.compute_variables import FREED_MEMORY, compute_variables
from rl_core.errors import UserError

_PARAMETERS: Final = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Environment variables of glibc, and the parameters of `mallopt` that they set, from malloc.h."""


def return_large_blocks() -> bool:
    """Let malloc map each block of at least 1 MiB by itself and unmap it when it is freed; returns whether malloc can.

    The processes of Ray workers start with the same sizes, which are those of `compute_variables`. glibc's own limit grows to
    the size of the largest block that was freed, up to 32 MiB. Tensors of batches of different sizes then come from the heap,
    whose free space cannot be returned if anything above it is in use.

    Raises:
        UserError: a size in the environment is not a number.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    sizes = {name: size for name, size in compute_variables().items() if name in FREED_MEMORY}
    for name, size in sizes.items():
        if not size.isdecimal():
            raise UserError(f"The environment variable {name} is {size!r}. Set it to a number of bytes, or unset it.")
    return mallopt is not None and all(mallopt(_PARAMETERS[name], int(size)) for name, size in sizes.items())
