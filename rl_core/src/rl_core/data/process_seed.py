"""Seeds the random generators of a process, so that dropout and code of others that draws from them can be repeated."""

from __future__ import annotations

import random
import sys


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
