"""Learning with rollouts that are up to k steps old: held-out success by step and by time, over several seeds.

    OMP_NUM_THREADS=1 python benchmarks/learning/staleness.py grpo.max_num_steps=60 --staleness 0 2 --seeds 0 1 2

Each run trains the model of the quickstart (`examples/grpo_addition.yaml`) over Ray with `rollout.max_staleness: k` and
`ahead: k`, each in a separate process. The runs alternate, so that other work on the machine affects all alike. All losses clip
against the sampler, so the runs differ only in k. Results: benchmarks/results/learning_staleness.json, in which earlier runs
stay unless they are repeated, curves of all these runs in docs/curves, and rollouts to review in the work folder. Finished
runs are not repeated: delete the work folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intervals import wilson
from run import write_review

from rl_train.metrics.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]

SUM = re.compile(r"(\d+)\+(\d+)=$")


def train(run: Path, staleness: int, seed: int, overrides: Sequence[str]) -> None:
    """Train one run, unless it is finished, and record its duration."""
    if (run / "cost.json").exists():
        return
    loss = ["++loss_fn.ratio_to=sampler"]
    rollout = [f"rollout.max_staleness={staleness}", f"rollout.ahead={staleness}"] if staleness else []
    settings = [*loss, *rollout, f"grpo.seed={seed}", "cluster.backend=ray", *overrides]
    folder = [f"logger.log_dir={run.parent}", f"logger.run_name={run.name}", "logger.num_rollouts_logged=1000"]
    command = [Path(sys.executable).with_name("rlcore"), "train", str(ROOT / "examples/grpo_addition.yaml"), *settings, *folder]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    cost = {"wall_s": round(time.perf_counter() - started, 1), "load": [round(load, 1) for load in os.getloadavg()]}
    (run / "cost.json").write_text(json.dumps(cost), encoding="utf-8")


def is_right(row: dict[str, Any]) -> bool:
    """Whether a rollout's text is the sum of its prompt, decided without the environment."""
    question = SUM.search(row["prompt"].strip())
    assert question is not None, row["prompt"]
    return str(row["completion"]).strip() == str(int(question[1]) + int(question[2]))


def summary(run: Path) -> dict[str, Any]:
    """Curve, held-out success, staleness and cost of a run."""
    rows = read_jsonl(run / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    held_out = [row for row in rows if "validation/accuracy" in row]
    final = read_jsonl(run / "rollouts" / f"step_{steps[-1]['step']:06d}.jsonl")
    right = [is_right(row) for row in final]
    validated = int(held_out[-1]["validation/rows"])
    successes = round(held_out[-1]["validation/accuracy"] * validated)
    seconds = {row["step"]: sum(other["time/step_s"] for other in steps if other["step"] <= row["step"]) for row in held_out}
    return {
        **json.loads((run / "cost.json").read_text()),
        "held_out": {row["step"]: round(row["validation/accuracy"], 4) for row in held_out},
        "held_out_interval": [round(value, 4) for value in wilson(successes, validated)],
        "seconds": {step: round(value) for step, value in seconds.items()},
        "reward": {row["step"]: round(row["reward/mean"], 4) for row in steps if row["step"] % 5 == 0},
        "seconds_of_steps": round(sum(row["time/step_s"] for row in steps), 1),
        "staleness_mean": round(statistics.mean(row["staleness/steps_mean"] for row in steps), 3),
        "staleness_max": max(row["staleness/steps_max"] for row in steps),
        "staleness_kl": round(statistics.mean(row.get("staleness/kl", 0.0) for row in steps), 6),
        "mismatch_max": max(row.get("mismatch/max", 0.0) for row in steps),
        "last_step": {
            "rollouts": len(final),
            "right": sum(right),
            "reward_without_success": sum(row["reward"] >= 1 and not ok for row, ok in zip(final, right, strict=True)),
            "success_without_reward": sum(row["reward"] < 1 and ok for row, ok in zip(final, right, strict=True)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning" / "staleness")
    parser.add_argument("--summary", action="store_true", help="write the results of the finished runs, and train none")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the config")
    chosen = parser.parse_intermixed_args()
    work = chosen.work.resolve()
    runs = {(k, seed): work / f"k{k}_seed{seed}" for seed in chosen.seeds for k in chosen.staleness}
    for (k, seed), run in runs.items() if not chosen.summary else ():
        train(run, k, seed, chosen.overrides)
    runs = {key: run for key, run in runs.items() if (run / "cost.json").exists()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    facts = {"commit": commit.stdout.strip(), "python": platform.python_version(), "cores": os.cpu_count()}
    output = ROOT / "benchmarks" / "results" / "learning_staleness.json"
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for (k, seed), run in runs.items():
        results[f"k={k}, seed {seed}"] = {**facts, "overrides": chosen.overrides, **summary(run)}
    results = json.loads(json.dumps(dict(sorted(results.items()))))  # all steps are texts, as in the file
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_review(work / "review.md", list(runs.values()))
    for metric, key, name in (("reward/mean", "reward", "reward"), ("validation/accuracy", "held_out", "accuracy")):
        with tempfile.TemporaryDirectory() as folder:
            curves = []
            for number, (label, result) in enumerate(results.items()):
                run = Path(folder) / str(number)
                run.mkdir()
                rows = [json.dumps({"step": int(step), metric: value}) for step, value in result[key].items()]
                (run / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
                curves.append(f"{label.replace('=', ' = ')}={run}")
            curve = ROOT / "docs" / "curves" / f"learning-staleness-{name}.svg"
            subprocess.run([sys.executable, ROOT / "docs" / "make_curves.py", curve, metric, *curves], check=True)


if __name__ == "__main__":
    main()
