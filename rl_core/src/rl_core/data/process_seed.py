"""Seeds the random generators of a process, so that dropout and code of others that draws from them can be repeated."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def seed_process(*numbers: int) -> None:
    """Seed Python's generator, and those of NumPy and torch (of all devices) if the process has imported them.

    Args:
        *numbers: the run's seed, and what distinguishes this process or step from others.
    """
    seed = random.Random(repr(numbers)).getrandbits(63)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@contextmanager
def separate_generators(kept: list[Any]) -> Iterator[None]:
    """Continue these generators from the states that `kept` has from the last such block; the block leaves those of others."""
    before = _states()
    for restore, state in kept:
        restore(state)
    try:
        yield
    finally:
        kept[:] = _states()
        for restore, state in before:
            restore(state)


def _states() -> list[Any]:
    states: list[Any] = [(random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        states.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return states
