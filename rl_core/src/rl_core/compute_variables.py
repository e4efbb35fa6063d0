"""Environment variables of compute processes. OpenMP reads its own when torch is imported, glibc when the process starts."""

import os

# Threads spin for half a millisecond, then sleep. Without spinning, decoding wakes threads hundreds of times per token and
# takes a quarter longer. OpenMP's default is to spin for over 10 ms, which slows down other processes.
_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
# In bytes: glibc returns freed blocks of 1 MiB or more, and keeps 64 MiB of others. By default, it keeps many of up to 32 MiB.
FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "67108864"}


def compute_variables() -> dict[str, str]:
    """For threads and for memory: the variables above that this process has, or the defaults if it has none of them."""
    own = [{name: os.environ[name] for name in group if name in os.environ} or group for group in (_THREADS, FREED_MEMORY)]
    return own[0] | own[1]
