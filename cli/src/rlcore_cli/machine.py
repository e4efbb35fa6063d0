"""The part of `rlcore doctor` about this machine: threads, memory, instruction sets of the CPU, and bubblewrap."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

_SETS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX-BF16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "ARM BF16",
}
"""Flags of /proc/cpuinfo that matter to matrix products, and their names."""
_BFLOAT16: Final = ("avx512_bf16", "amx_bf16", "bf16")


def print_machine() -> None:
    """Print threads, memory, instruction sets and whether sandboxes are available."""
    from rl_train.sizes import available_memory, format_size

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print("machine")
    print(f"  cpu     {platform.machine()}, {threads} threads, {format_size(available_memory())} of memory available")
    for line in instruction_lines(_cpu_flags()):
        print(f"  {line}")
    where = shutil.which("bwrap")
    if where is not None:
        print(f"  ok      bubblewrap, for programs that models write: {where}")
    else:
        print("  missing bubblewrap, for programs that models write: apt-get install bubblewrap, or dnf install bubblewrap")
    print()


def instruction_lines(flags: Sequence[str] | None) -> Iterable[str]:
    """What to print about instruction sets.

    Args:
        flags: of /proc/cpuinfo; None if the system does not have it.
    """
    if flags is None:
        return
    present = [name for flag, name in _SETS.items() if flag in flags]
    yield f"sets    {', '.join(present) or 'none of ' + ', '.join(_SETS.values())}"
    if not any(flag in flags for flag in _BFLOAT16):
        yield "note    no bfloat16 instructions: with `precision: bfloat16`, the hf policy multiplies in float32"


def _cpu_flags() -> Sequence[str] | None:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    fields = (line.partition(":") for line in lines)
    return next((value.split() for key, _, value in fields if key.strip() in ("flags", "Features")), None)
