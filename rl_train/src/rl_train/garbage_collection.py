"""How often Python looks for cyclic garbage in a process that imports much or holds many rollouts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, Final

_YOUNGER_COLLECTIONS: Final = 200
"""Collections of the middle generation before a full one; 10 by default. Young garbage, such as tensors in cycles, is found as
often as before."""
_IMPORTED: Final = 1_000_000
"""More objects than all imports of a command make: 740,000 with policy and engine."""
_LATEST_S: Final = 30.0
"""When the first collection takes place if nothing else has caused it."""


def late_first_collection() -> None:
    """Search for garbage as usual only after the first collection, which comes after half a minute or with `gc.collect`.

    PyTorch and Transformers make most of a million objects that stay; searching them again and again takes a third of the time
    of their imports.
    """
    thresholds = gc.get_threshold()

    def after_first(phase: str, _: Any) -> None:
        if phase == "stop":
            gc.callbacks.remove(after_first)
            gc.freeze()
            gc.set_threshold(*thresholds)

    gc.callbacks.append(after_first)
    gc.set_threshold(_IMPORTED, *thresholds[1:])
    latest = Timer(_LATEST_S, gc.collect, (0,))  # a command such as `serve` may run for weeks and make few objects
    latest.daemon = True
    latest.start()


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
