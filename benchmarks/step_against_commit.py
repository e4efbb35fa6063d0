"""Guards the speed of a training step: pairs of today's sources and those of an older commit, with the same libraries.

    python benchmarks/step_against_commit.py                     # five pairs with the commit in step_baseline.txt
    python benchmarks/step_against_commit.py --old HEAD~20 --pairs 3

The step is that of the README: a Llama with the shape of SmolLM2-135M (random weights), 2 prompts of 74 tokens x 8 samples of
64 tokens, float32, in one process with two threads. Each run is a whole `rlcore train` of three steps, and the pairs alternate.
CPU-seconds are compared, because other processes change them less than the time; those of the kernel are shown apart. Exits
with 1 if the median of the ratios is above 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml
from generation_vs_transformers import SMOLLM2_135M
from plan_vs_measured import REWARDS, ROOT, make_model

sys.path.insert(0, str(ROOT / "tests" / "golden"))
from checkouts import Checkout, checkouts

BASELINE = Path(__file__).with_name("step_baseline.txt")
MOST = 1.10
CONFIG = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 8, "max_num_steps": 3, "seed": 0},
    "policy": {
        "backend": "hf",
        "model_name": "model",
        "max_total_sequence_length": 138,
        "train_micro_batch_size": 16,
        "generation": {"backend": "hf", "max_new_tokens": 64},
    },
    "data": {"train": {"dataset_name": "jsonl", "path": "questions.jsonl"}, "shuffle": False},
    "env": {"varied": {"reward_fn": "varied_rewards.varied"}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}


class Cost(NamedTuple):
    """CPU-seconds of a run."""

    all: float
    kernel: float


def write_inputs(folder: Path) -> None:
    """Model, questions, reward function and config."""
    make_model(folder / "model", SMOLLM2_135M)
    (folder / "varied_rewards.py").write_text(REWARDS, encoding="utf-8")
    rows = [{"question": f"{row:073}=", "expected_answer": "0"} for row in range(6)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")


def cost(checkout: Checkout, folder: Path) -> Cost:
    """What a run costs with the sources of a checkout."""
    command = [sys.executable, "-c", "from rlcore_cli.main import main; main()", "train", "run.yaml", "--resume", "never"]
    environment = {**checkout.environment, "OMP_NUM_THREADS": "2"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{checkout.label} failed:\n{(folder / 'output').read_text(errors='replace')[-2000:]}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_stime)


def main() -> int:
    """Print a row of a Markdown table for each pair, and the median; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default=BASELINE.read_text().split()[0], help="folder or commit")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        folder.mkdir()
        write_inputs(folder)
        print("| pair | old: CPU-s (kernel) | new: CPU-s (kernel) | new / old |\n|---|---|---|---|")
        with checkouts((options.old, str(ROOT)), Path(temporary)) as both:
            for pair in range(options.pairs):
                order = both if pair % 2 == 0 else both[::-1]
                costs = {checkout.label: cost(checkout, folder) for checkout in order}
                old, new = costs["OLD"], costs["NEW"]
                ratios.append(new.all / old.all)
                cells = [f"{each.all:.1f} ({each.kernel:.1f})" for each in (old, new)]
                print(f"| {pair + 1} | {cells[0]} | {cells[1]} | {ratios[-1]:.3f} |", flush=True)
    median = statistics.median(ratios)
    print(f"median of new / old: {median:.3f}, at most {MOST:.2f} is allowed")
    return int(median > MOST)


if __name__ == "__main__":
    sys.exit(main())
