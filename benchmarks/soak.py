"""Measure the resident memory of a long run: the addition example in one process, with validation and checkpoints on the way.

python benchmarks/soak.py --steps 500 --at 50 250 500
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_addition.yaml"


def soak(folder: Path, steps: int) -> dict[int, float]:
    """Train `steps` steps of 64 rollouts; returns the resident memory of the process in MiB after each step."""
    changes = {
        "grpo.max_num_steps": steps,
        "grpo.num_prompts_per_step": 8,
        "grpo.val_batch_size": 64,
        "data.validation.num_samples": 64,
        "policy.train_micro_batch_size": 64,
        "cluster.backend": "in_process",
        "logger.log_dir": folder,
        "logger.run_name": "soak",
    }
    command = [sys.executable, "-m", "rlcore_cli.main", "train", EXAMPLE, *(f"{key}={value}" for key, value in changes.items())]
    memory: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            metrics = folder / "soak" / "metrics.jsonl"
            done = metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else 0  # the first line is the validation before
            memory.setdefault(done, process.memory_info().rss / 2**20)
            time.sleep(0.02)
    if run.returncode != 0:
        raise SystemExit(run.returncode)
    return memory


def at(memory: dict[int, float], step: int) -> float:
    """The memory after a step; the last step may have ended with the process, before it could be measured."""
    return memory[max(measured for measured in memory if measured <= step)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--at", type=int, nargs="+", default=[50, 250, 500], help="steps whose memory is printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory = soak(Path(folder), options.steps)
    print(f"{os.cpu_count()} cores; GRPO on the addition example in one process, 64 rollouts a step")
    print("| step | resident memory (MiB) |\n|---|---|")
    for step in options.at:
        print(f"| {step} | {at(memory, step):.0f} |")


if __name__ == "__main__":
    main()
