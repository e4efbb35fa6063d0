"""Prompt samplers against uniform sampling: held-out reward by trained tokens, on a task of mixed and one of equal difficulty.

    OMP_NUM_THREADS=1 python benchmarks/curricula.py
    OMP_NUM_THREADS=1 python benchmarks/curricula.py --tasks equal --seeds 7 --work /tmp/trial --no-results

The quickstart's model answers sums without a carry from the units (0.98 of its samples), mostly drops that carry (0.3), and
has never seen sums of three digits (0). The mixed task has 240, 120 and 240 rows of these kinds, the equal task 600 rows with
the carry; held-out rows have other pairs of numbers, in the same shares.

A run reaches a reward at the first validation at which the mean of the last three validations has it. The result of a sampler
is the number of trained tokens with which it reaches the last such mean of the uniform run of the same seed, divided by those
with which that run first reaches it. Finished runs are not repeated: delete the work folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_train.metrics.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VALIDATIONS, AVERAGED = 20, 3
SEEDS = (0, 1, 2)
KINDS: Mapping[str, tuple[int, Callable[[int, int], bool]]] = {
    "easy": (2, lambda left, right: left % 10 + right % 10 < 10),
    "carry": (2, lambda left, right: left % 10 + right % 10 >= 10),
    "long": (3, lambda left, right: True),
}
"""Number of digits of both numbers, and which pairs are of the kind."""
TASKS: Mapping[str, Mapping[str, int]] = {"mixed": {"easy": 240, "carry": 120, "long": 240}, "equal": {"carry": 600}}
"""Number of training rows of each kind; `HELD_OUT` others have the same shares."""
HELD_OUT = 500
STEPS, LEARNING_RATE = {"mixed": 120, "equal": 40}, {"mixed": 3.0e-5, "equal": 2.0e-5}
"""By task: the equal task has five times as many rows to learn from in a step. There, other samplers than the uniform one train
for `LONGER` times as many steps, because the reward still rises at the end: otherwise, no ratio above 1 could be measured."""
LONGER = 1.25
SAMPLERS: Mapping[str, Mapping[str, Any] | None] = {
    "uniform": None,
    "pass_rate_band": {"name": "pass_rate_band"},
    "task_mix": {"name": "task_mix"},
    "stages": {"name": "stages", "key": "level", "bounds": [1, 2], "at_reward": 0.8},
}
"""The section `data.sampler` of each, with the defaults of all samplers. `level` is 1 for easy, 2 for carry and 3 for long."""
OF_ONE_TASK = ("uniform", "pass_rate_band")
"""Samplers for a task of one kind."""


def rows_of(kinds: Mapping[str, int], *, held_out: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Different pairs of each kind; a quarter of all pairs is held out, by a hash."""
    rows = []
    for level, (kind, (digits, fits)) in enumerate(KINDS.items(), start=1):
        draw, pairs = random.Random(f"{seed} {kind} {held_out}"), set[tuple[int, int]]()
        count = kinds.get(kind, 0)
        while len(pairs) < (count * HELD_OUT // sum(kinds.values()) if held_out else count):
            left, right = (draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
            if fits(left, right) and (random.Random(f"{left}+{right}").random() < 0.25) == held_out:
                pairs.add((left, right))
        for left, right in sorted(pairs):
            rows.append(
                {"question": f"{left}+{right}=", "expected_answer": str(left + right), "task_name": kind, "level": level}
            )
    return rows


def config_of(task: str, sampler: str, seed: int, work: Path) -> dict[str, Any]:
    """The config of a run: as the quickstart, with smaller steps and a constant learning rate."""
    sections = {}
    for split, held_out in (("train", False), ("validation", True)):
        path = work / f"{task}_{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(TASKS[task], held_out=held_out)), encoding="utf-8")
        sections[split] = {"dataset_name": "jsonl", "path": str(path), "record_fn": "curricula.record"}
    steps = round(STEPS[task] * LONGER) if task == "equal" and sampler != "uniform" else STEPS[task]
    return {
        "grpo": {
            "seed": seed,
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 8,
            "max_num_steps": steps,
            "adv_estimator": {"normalize_rewards": False},
            "val_period": STEPS[task] // VALIDATIONS,
            "val_at_start": True,
            "val_batch_size": 512,
        },
        "policy": {
            "backend": "hf",
            "model_name": str(ROOT / "examples" / "addition" / "model"),
            "max_total_sequence_length": 16,
            "train_micro_batch_size": 256,
            "optimizer": {"kwargs": {"lr": LEARNING_RATE[task], "weight_decay": 0.0}},
            "generation": {"backend": "hf", "max_new_tokens": 6, "val_temperature": 0.0},
        },
        "data": sections | ({"sampler": SAMPLERS[sampler]} if SAMPLERS[sampler] else {}),
        "env": {kind: {"name": "arithmetic", "num_workers": 1} for kind in TASKS[task]},
        "checkpointing": {"enabled": False},
        "cluster": {"backend": "in_process", "use_gpus": False},
        "logger": {"log_dir": str(work), "run_name": f"{task}_{sampler}_seed{seed}", "num_rollouts_logged": 0},
    }


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a record whose task is its kind."""
    return {
        "messages": [{"role": "user", "content": row["question"]}],
        "extra_env_info": {"expected_answer": row["expected_answer"], "level": row["level"]},
        "task_name": row["task_name"],
    }


def train(task: str, sampler: str, seed: int, work: Path) -> dict[str, Any]:
    """Train one run, unless it is finished; returns its curve."""
    config = config_of(task, sampler, seed, work)
    folder = work / config["logger"]["run_name"]
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted run starts again
        path = folder.with_suffix(".yaml")
        path.write_text(json.dumps(config), encoding="utf-8")
        paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        with folder.with_suffix(".log").open("w") as log:
            command = [Path(sys.executable).with_name("rlcore"), "train", path]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log, check=True)
        (folder / "done").touch()
    rows = read_jsonl(folder / "metrics.jsonl")
    tokens = 0.0
    curve: dict[str, list[float]] = {"step": [], "tokens": [], "held_out": []}
    for row in rows:
        tokens += row.get("tokens/trained", 0.0)
        if "validation/reward" in row:
            for key, value in (("step", row["step"]), ("tokens", tokens), ("held_out", round(row["validation/reward"], 4))):
                curve[key].append(value)
    return {**curve, "seconds": round(sum(row.get("time/step_s", 0.0) for row in rows), 1)}


def averaged(curve: Mapping[str, Sequence[float]]) -> list[tuple[float, float]]:
    """Trained tokens, and the mean of the last held-out rewards."""
    held_out = curve["held_out"]
    means = [statistics.mean(held_out[end - AVERAGED : end]) for end in range(AVERAGED, len(held_out) + 1)]
    return list(zip(curve["tokens"][AVERAGED - 1 :], means, strict=True))


def tokens_until(curve: Mapping[str, Sequence[float]], reward: float) -> float | None:
    """Trained tokens with which a curve reaches a reward; None if it does not."""
    return next((tokens for tokens, mean in averaged(curve) if mean >= reward), None)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Held-out rewards and tokens of each run, as Markdown."""
    lines = [
        "| task | sampler | seed | held-out reward before | last three | tokens | tokens until uniform's | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[tuple[str, str], list[float | None]] = {}
    for name, curve in results.items():
        task, sampler, seed = name.split()
        uniform = results[f"{task} uniform {seed}"]
        target = averaged(uniform)[-1][1]
        own, others = tokens_until(curve, target), tokens_until(uniform, target)
        ratio = None if own is None or others is None else own / others
        ratios.setdefault((task, sampler), []).append(ratio)
        lines.append(
            f"| {task} | `{sampler}` | {seed} | {curve['held_out'][0]:.3f} | {averaged(curve)[-1][1]:.3f} | "
            f"{curve['tokens'][-1]:,.0f} | {'not reached' if own is None else f'{own:,.0f}'} | "
            f"{'' if ratio is None else f'{ratio:.2f}'} |"
        )
    lines += ["", "| task | sampler | median ratio |", "|---|---|---|"]
    for (task, sampler), found in ratios.items():
        known = [float("inf") if each is None else each for each in found]
        lines.append(f"| {task} | `{sampler}` | {statistics.median(known):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=[*TASKS])
    parser.add_argument("--samplers", nargs="+", choices=sorted(SAMPLERS), default=[*SAMPLERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "curricula")
    parser.add_argument("--no-results", action="store_true", help="write nothing outside the work folder")
    chosen = parser.parse_args()
    work = chosen.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for task in chosen.tasks:
        for seed in chosen.seeds:
            for sampler in chosen.samplers:
                if task == "equal" and sampler not in OF_ONE_TASK:
                    continue
                results[f"{task} {sampler} {seed}"] = train(task, sampler, seed, work)
                print(task, sampler, seed, results[f"{task} {sampler} {seed}"]["held_out"][-3:], flush=True)
    print(table(results))
    if not chosen.no_results:
        (RESULTS / "curricula.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
