"""CPU time of processes and of their descendants, for benchmarks of several processes."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(*roots: int) -> float:
    """CPU seconds so far of these processes, by default of this one, and of their descendants.

    Ended processes count if their parent has waited for them; the time of a killed process that nobody waited for is lost.
    """
    roots = roots or (os.getpid(),)
    parents, times = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
        times[int(path.parent.name)] = sum(map(int, fields[11:15])) / _TICKS
    total = 0.0
    for pid, seconds in times.items():
        ancestor = pid
        while ancestor not in (0, *roots):
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor in roots else 0.0
    return total
