"""Returns memory that was freed in this process to the operating system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return free memory of the C library's heap, which would stay with this process while another one needs it.

    glibc keeps freed blocks of up to 32 MiB, such as packed weights, because the memory next to them is in use. Has no effect
    with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
