"""Seeds the random generators of a process, so that dropout and code of others that draws from them can be repeated."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
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


def seed_call(worker: Any, method: str, arguments: Sequence[Any], *, seed: int, rank: int) -> None:
    """Seed for a call of a worker that may draw numbers, which are then the same in a resumed run.

    `train` depends on the rank and the weight version, `generate` on the `sample_seeds` of its rows, and `poll` on those of
    the rows that arrive. Other calls continue the generators: in a `poll` without arrivals, rows are in progress.
    """
    if not hasattr(worker, "get_weight_version"):
        return
    if method == "train":
        seed_process(seed, rank, worker.get_weight_version())
    elif method in ("generate", "poll"):
        rows = [arguments[0]] if method == "generate" else [request.row for request in arguments[0]]
        seeds = [number for row in rows if "sample_seeds" in row for number in row["sample_seeds"].tolist()]
        if seeds:
            seed_process(seed, *seeds)
