"""Measures the cost of returning freed tensors to the system instead of letting glibc keep them.

    python benchmarks/freed_memory_cost.py quickstart 3    # three alternating rounds of all sizes
    python benchmarks/freed_memory_cost.py lora 1 --kib 128 1024

Each run trains in one process with one thread. Blocks of at least so many KiB are mapped by themselves, and unmapped when they
are freed. 1024 is what `rlcore` sets; 32768, the most that glibc's default grows to, stands for it. Needs Linux with glibc.
Results: results/freed_memory_cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from plan_vs_measured import CASES, ROOT, write_inputs

from rl_core.compute_variables import FREED_MEMORY

RLCORE = Path(sys.executable).with_name("rlcore")
QUICKSTART = (
    "cluster.backend=in_process",
    "grpo.max_num_steps=15",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
)


def arguments_of(name: str, folder: Path) -> list[str]:
    """Arguments of `rlcore train` for a config: the quickstart, or one of plan_vs_measured.py with one step."""
    if name == "quickstart":
        return [str(ROOT / "examples" / "grpo_addition.yaml"), *QUICKSTART]
    return [*write_inputs(CASES[name], folder), "grpo.max_num_steps=1"]


def measure(arguments: list[str], kib: int) -> str:
    """One run: CPU-seconds (in the kernel), wall-clock seconds, page faults and peak resident size."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **FREED_MEMORY, "MALLOC_MMAP_THRESHOLD_": str(1024 * kib)}
    start = time.monotonic()
    process = subprocess.Popen([RLCORE, "train", *arguments], stdout=subprocess.DEVNULL, env=env)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rlcore train ended with {os.waitstatus_to_exitcode(status)}")
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    return f"{cpu:.1f} ({used.ru_stime:.1f}) | {wall:.0f} | {used.ru_minflt / 1e6:.2f} | {used.ru_maxrss / 1024:.0f}"


def main() -> None:
    """Print a row of a Markdown table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=["quickstart", *CASES])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--kib", type=int, nargs="+", default=[1024, 32768], help="sizes")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        arguments = arguments_of(options.config, Path(temporary))
        for _ in range(options.rounds):
            for kib in options.kib:
                print(f"| {options.config} | {kib} | {measure(arguments, kib)} |", flush=True)


if __name__ == "__main__":
    main()
