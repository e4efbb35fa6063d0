"""Measures the cost of returning freed tensors to the system instead of letting glibc keep them.

    python benchmarks/freed_memory_cost.py quickstart 2     # two alternating rounds of all thresholds
    python benchmarks/freed_memory_cost.py lora 1

Each run trains in one process with one thread. `MALLOC_MMAP_THRESHOLD_` is the size in bytes from which each block is mapped by
itself, and unmapped when it is freed. Needs Linux with glibc. Results: results/freed_memory_cost.md.
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

RLCORE = Path(sys.executable).with_name("rlcore")
THRESHOLDS = {"default": None, "4 MiB": 4 * 2**20, "128 KiB": 2**17}
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


def measure(arguments: list[str], threshold: int | None) -> str:
    """One run: CPU-seconds (in the kernel), wall-clock seconds, page faults and peak resident size."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if threshold is not None:
        env["MALLOC_MMAP_THRESHOLD_"] = str(threshold)
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
    options = parser.parse_args()
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        arguments = arguments_of(options.config, Path(temporary))
        for _ in range(options.rounds):
            for name, threshold in THRESHOLDS.items():
                print(f"| {options.config} | {name} | {measure(arguments, threshold)} |", flush=True)


if __name__ == "__main__":
    main()
