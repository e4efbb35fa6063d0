"""Policy-gradient losses and advantage estimators on the same tasks, at equal trained tokens and at equal CPU time.

    OMP_NUM_THREADS=1 python benchmarks/losses.py --work /tmp/losses                   # both tasks, three seeds: half an hour
    python benchmarks/losses.py --work /tmp/losses --tasks sums --seeds 0 --steps 20       # minutes
    python benchmarks/losses.py --work /tmp/losses --losses dapo dppo

`sums` has answers of 2 to 4 tokens; in `calculator`, right answers have two turns and about 16 tokens, wrong ones mostly one
turn and 8. Each step makes four optimizer steps, so that ratios differ from 1. All runs of a task and seed start from the same
model and draw the same prompts. The table has the held-out accuracy after the last step; after the tokens, and after the
CPU-seconds of training, that every run of the task reached; the sampled entropy in the last step; and the fraction of tokens
whose bound took effect. CPU-seconds are those of the process, less the share of validation in the time of the step. Numbers are
means over seeds, with the lowest and the highest. Finished runs in the work folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_train.launch.train import train
from rl_train.metrics.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
TASKS: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "sums": (
        "grpo_addition.yaml",
        16,
        (
            "grpo.num_prompts_per_step=32",
            "policy.train_global_batch_size=64",
            "policy.train_micro_batch_size=64",
            "grpo.adv_estimator={}",
        ),
    ),
    "calculator": (
        "grpo_tools.yaml",
        12,
        (
            "grpo.num_prompts_per_step=8",
            "policy.train_global_batch_size=16",
            "++policy.generation.val_temperature=1.0",
            "grpo.val_batch_size=256",
            "grpo.max_val_samples=256",
        ),
    ),
}
"""Each task's config in examples, the number of steps, and what is changed in the config."""
COMMON = (
    "cluster.backend=in_process",
    "checkpointing.enabled=false",
    "grpo.val_at_start=true",
    "grpo.val_at_end=true",
    "++callbacks.cpu.name=losses.record_cpu_seconds",
)
LOSSES: Mapping[str, tuple[str, ...]] = {
    "clipped_pg": (),
    "dapo": ("++loss_fn.name=dapo",),
    "cispo": ("++loss_fn.name=cispo",),
    "gspo": ("++loss_fn.name=gspo",),
    "luspo": ("++loss_fn.name=gspo", "++loss_fn.constant_length_normalizer=1"),
    "dppo": ("++loss_fn.name=dppo",),
    "dppo_kl": ("++loss_fn.name=dppo", "++loss_fn.divergence=kl"),
    "sapo": ("++loss_fn.name=sapo",),
    "gmpo": ("++loss_fn.name=gmpo",),
    "vespo": ("++loss_fn.name=vespo",),
    "clip_cov": ("++loss_fn.name=clip_cov",),
    "kl_cov": ("++loss_fn.name=kl_cov",),
    "max_rl": ("grpo.adv_estimator.name=max_rl",),
    "remax": ("grpo.adv_estimator.name=remax",),
    "optimal_token_baseline": ("grpo.adv_estimator.name=optimal_token_baseline",),
}
Steps = Sequence[Mapping[str, Any]]
_CPU = "cpu_seconds.jsonl"


def record_cpu_seconds(run: Any, step: int) -> None:
    """A callback that writes the CPU-seconds of the process so far."""
    with (run.folder / _CPU).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "cpu_seconds": time.process_time()}) + "\n")


def steps_of(work: Path, task: str, loss: str, seed: int, steps: int) -> Steps:
    """The metrics of a run by step, with the sums of tokens and CPU-seconds so far; trains unless the run is finished."""
    name = f"{task}-{loss}-{seed}-{steps}"
    file = work / name / "metrics.jsonl"
    found = read_jsonl(file) if file.exists() else []
    if not found or found[-1]["step"] < steps:
        config, _, changes = TASKS[task]
        run = (f"grpo.max_num_steps={steps}", f"grpo.seed={seed}", f"grpo.val_period={max(1, steps // 4)}")
        place = (f"logger.log_dir={work}", f"logger.run_name={name}")
        train(ROOT / "examples" / config, [*changes, *COMMON, *LOSSES[loss], *run, *place], resume="never", console=False)
        found = read_jsonl(file)
    cpu = {row["step"]: row["cpu_seconds"] for row in read_jsonl(file.with_name(_CPU))}
    tokens = seconds = 0.0
    rows = []
    for metrics in found:
        tokens += metrics.get("tokens/trained", 0.0)
        if metrics["step"]:
            trains = 1 - metrics.get("time/validate_s", 0.0) / metrics["time/step_s"]
            seconds += trains * (cpu[metrics["step"]] - cpu[metrics["step"] - 1])
        rows.append({**metrics, "tokens": tokens, "seconds": seconds})
    return rows


def accuracy_within(rows: Steps, key: str, budget: float) -> float:
    """The held-out accuracy after a budget of tokens or seconds, in percent: linear between two validations."""
    measured = [row for row in rows if "validation/accuracy" in row]
    return 100 * float(np.interp(budget, [row[key] for row in measured], [row["validation/accuracy"] for row in measured]))


def last(rows: Steps, key: str) -> float:
    return float(next((row[key] for row in reversed(rows) if key in row), float("nan")))


def shown(values: Sequence[float], digits: int = 1) -> str:
    if any(map(math.isnan, values)):  # a loss without bounds
        return "-"
    mean = statistics.fmean(values)
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def table(runs: Mapping[str, Sequence[Steps]]) -> str:
    """Markdown, one row for each loss, from its runs."""
    budgets = {key: min(rows[-1][key] for of_loss in runs.values() for rows in of_loss) for key in ("tokens", "seconds")}
    columns: Mapping[str, Callable[[Steps], float]] = {
        "at the end, %": lambda rows: accuracy_within(rows, "tokens", float("inf")),
        f"at {budgets['tokens'] / 2:,.0f} tokens, %": lambda rows: accuracy_within(rows, "tokens", budgets["tokens"] / 2),
        f"at {budgets['tokens']:,.0f} tokens, %": lambda rows: accuracy_within(rows, "tokens", budgets["tokens"]),
        f"at {budgets['seconds']:.0f} CPU-s, %": lambda rows: accuracy_within(rows, "seconds", budgets["seconds"]),
        "entropy, nats": lambda rows: last(rows, "entropy/sampled"),
        "bounded, %": lambda rows: 100 * last(rows, "ratio/clipped_frac"),
    }
    lines = [f"| loss | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for loss, of_loss in runs.items():
        cells = (shown([value(rows) for rows in of_loss], 3 if "nats" in name else 1) for name, value in columns.items())
        lines.append(f"| {loss} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="number of steps, if not that of the task")
    given = parser.parse_args()
    for task in given.tasks:
        steps = given.steps or TASKS[task][1]
        runs = {loss: [steps_of(given.work, task, loss, seed, steps) for seed in given.seeds] for loss in given.losses}
        seeds = ", ".join(map(str, given.seeds))
        print(f"\n{task}: held-out accuracy of {steps} steps, seeds {seeds}\n\n{table(runs)}", flush=True)


if __name__ == "__main__":
    main()
