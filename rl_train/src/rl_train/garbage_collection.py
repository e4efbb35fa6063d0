"""How often Python looks for cyclic garbage in a process that holds many rollouts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_YOUNGER_COLLECTIONS: Final = 200
"""Collections of the middle generation before a full one; 10 by default. Young garbage, such as tensors in cycles, is found as
often as before."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Search all objects of this process for cyclic garbage a twentieth as often.

    A full collection visits every object of every rollout. At 8,192 rows per step, such collections took a third of the
    driver's CPU time.
    """
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _YOUNGER_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
