"""How torch's threads wait between two operations: environment variables, which OpenMP reads when torch is imported."""

import os

# Threads spin for half a millisecond, then sleep. Without spinning, decoding wakes threads hundreds of times per token and
# takes a quarter longer. OpenMP's default is to spin for over 10 ms, which slows down other processes.
_VARIABLES = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}


def thread_waiting() -> dict[str, str]:
    """The environment variables for a compute process: those of this process if any is set, else the defaults above."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} or dict(_VARIABLES)
