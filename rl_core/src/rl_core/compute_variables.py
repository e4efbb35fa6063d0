"""Environment variables of compute processes. OpenMP reads them when torch is imported."""

import os

# Threads spin for half a millisecond, then sleep. Without spinning, decoding wakes threads hundreds of times per token and
# takes a quarter longer. OpenMP's default is to spin for over 10 ms, which slows down other processes.
_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}


def compute_variables() -> dict[str, str]:
    """The variables above that this process has, or the defaults if it has none of them."""
    return {name: os.environ[name] for name in _THREADS if name in os.environ} or _THREADS
