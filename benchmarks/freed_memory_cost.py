"""Measures what it costs to return freed tensors to the system, and how much memory it saves.

    python benchmarks/freed_memory_cost.py quickstart 5    # five alternating rounds of all ways
    python benchmarks/freed_memory_cost.py lora 1 --ways trimmed mapped --threads 2

Each run trains in one process. Three ways are compared: `trimmed`, which is what `rlcore` does, returns what is free after each
layer, microbatch and phase; `mapped` also maps each block of at least 1 MiB by itself, and unmaps it when it is freed; `kept`
returns nothing, as glibc does by default. Needs Linux with glibc. Results: results/freed_memory_cost.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from plan_vs_measured import CASES, ROOT, write_inputs

SAMPLE_S = 0.01
QUICKSTART = (
    "cluster.backend=in_process",
    "grpo.max_num_steps=15",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
)
NO_TRIM = "import ctypes; load = ctypes.CDLL; ctypes.CDLL = lambda name, *rest, **more: name and load(name, *rest, **more); "
WAYS = {
    "trimmed": ("", {}),
    "mapped": ("", {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "67108864"}),
    "kept": (NO_TRIM, {}),
}
"""For each way, code that runs before the command, and environment variables."""


def arguments_of(name: str, folder: Path) -> list[str]:
    """Arguments of `rlcore train` for a config: the quickstart, or one of plan_vs_measured.py with one step."""
    if name == "quickstart":
        return [str(ROOT / "examples" / "grpo_addition.yaml"), *QUICKSTART]
    return [*write_inputs(CASES[name], folder), "grpo.max_num_steps=1"]


def measure(arguments: list[str], folder: Path, way: str, threads: int) -> str:
    """One run: CPU-seconds (in the kernel), wall-clock seconds, page faults and peak resident size."""
    before, variables = WAYS[way]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{before}from rlcore_cli.main import main; main()", "train", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **variables},
    )
    peak = 0  # sampled, because a run resets the peak that the kernel records
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        peak = max(peak, pages * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(SAMPLE_S)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rlcore train ended with {os.waitstatus_to_exitcode(status)}")
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    return f"{cpu:.1f} ({used.ru_stime:.1f}) | {wall:.1f} | {used.ru_minflt / 1e6:.2f} | {peak / 2**20:.0f}"


def main() -> None:
    """Print a row of a Markdown table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=["quickstart", *CASES])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for number in range(options.rounds):
        for way in options.ways if number % 2 == 0 else options.ways[::-1]:
            with TemporaryDirectory() as folder:
                arguments = arguments_of(options.config, Path(folder))
                found = measure(arguments, Path(folder), way, options.threads)
            print(f"| {options.config} | {options.threads} | {way} | {found} |", flush=True)


if __name__ == "__main__":
    main()
