"""Learning with rollouts that are up to k steps old: held-out success and reward by step and by time, over several seeds.

    OMP_NUM_THREADS=1 python benchmarks/learning/staleness.py
    OMP_NUM_THREADS=1 python benchmarks/learning/staleness.py --variants ppo guess --seeds 0 --work /tmp/trial --no-results

Each run is a process of `rlcore train` over Ray with `rollout.max_staleness: k` and `ahead: k`. All losses clip against the
sampler, except one that does not correct for older weights (`uncorrected.py`). The values of k alternate, so that other work
on the machine affects all alike. After each run, its values are written to benchmarks/results/learning_staleness.json; at the
end, curves are drawn in docs/curves, and rollouts to review are written to the work folder. Finished runs are not repeated:
delete the work folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from intervals import wilson
from run import HERE, ROOT, disagreements, warm_up, write_data, write_review
from tasks import TASKS, Task
from uncorrected import install

from rl_train.metrics.jsonl import read_jsonl

sys.path.insert(0, str(ROOT / "benchmarks"))
from cpu_time import cpu_seconds

_SUM = re.compile(r"(\d+)\+(\d+)=$")


def is_sum(prompt: str, completion: str) -> bool:
    """Whether a completion is the sum of its prompt, decided without the environment."""
    question = _SUM.search(prompt.strip())
    assert question is not None, prompt
    return completion.strip() == str(int(question[1]) + int(question[2]))


SUMS = Task(succeeded=is_sum)
CORRECTED, UNCORRECTED = ["++loss_fn.ratio_to=sampler"], ["++loss_fn.name=uncorrected"]
COMMON = ["cluster.backend=ray", "checkpointing.enabled=false", "logger.num_rollouts_logged=1000"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An algorithm, task or engine.

    Attributes:
        config: The config of its runs.
        overrides: Of this config.
        modes: Staleness k, and whether the loss corrects for older weights.
        algorithm: The section of the algorithm.
    """

    config: Path
    overrides: Sequence[str]
    modes: Sequence[tuple[int, bool]] = ((0, True), (2, True))
    algorithm: str = "grpo"
    task: Task = SUMS


ADDITION = ROOT / "examples" / "grpo_addition.yaml"
SMALL = ["grpo.max_num_steps=40", "grpo.num_prompts_per_step=32", "grpo.val_period=5"]
PPO = ROOT / "examples" / "ppo_addition.yaml"
PPO_STEPS = ["ppo.max_num_steps=40", "ppo.val_period=5"]
ONE_OPTIMIZER_STEP = ["ppo.ppo_epochs=1", "policy.train_global_batch_size=256", "value.train_global_batch_size=256"]
VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant(config=ADDITION, overrides=SMALL, modes=((0, True), (1, True), (2, True), (4, True), (4, False))),
    "dynamic_sampling": Variant(config=ADDITION, overrides=[*SMALL, "grpo.use_dynamic_sampling=true"]),
    "ppo": Variant(config=PPO, overrides=[*PPO_STEPS, *ONE_OPTIMIZER_STEP], algorithm="ppo"),
    "ppo_four_optimizer_steps": Variant(config=PPO, overrides=PPO_STEPS, algorithm="ppo"),
    "guess": Variant(config=HERE / "guess.yaml", overrides=["grpo.max_num_steps=30", "grpo.val_period=5"], task=TASKS["guess"]),
    "agents": Variant(
        config=HERE / "agents.yaml", overrides=["grpo.max_num_steps=20", "grpo.val_period=5"], task=TASKS["agents"]
    ),
    "vllm": Variant(config=ADDITION, overrides=[*SMALL, "grpo.max_num_steps=20", "policy.generation.backend=vllm"]),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a variant."""

    variant: str
    staleness: int
    corrected: bool
    seed: int

    @property
    def mode(self) -> str:
        """The label of its curve."""
        return f"k = {self.staleness}" if self.corrected else "uncorrected"

    @property
    def label(self) -> str:
        """Its key in the results."""
        return f"{self.variant}, k = {self.staleness}{'' if self.corrected else ' uncorrected'}, seed {self.seed}"

    def folder(self, work: Path) -> Path:
        """The folder of the run."""
        return work / f"{self.variant}_k{self.staleness}{'' if self.corrected else '_uncorrected'}_seed{self.seed}"


def train(run: Run, work: Path, start: Sequence[str]) -> None:
    """Train one run, unless it is finished, and record its duration, CPU time and commit."""
    folder, variant = run.folder(work), VARIANTS[run.variant]
    if (folder / "cost.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted run starts again
    settings = [*COMMON, *variant.overrides, *start, *(CORRECTED if run.corrected else UNCORRECTED)]
    settings += [f"{variant.algorithm}.seed={run.seed}", f"logger.log_dir={work}", f"logger.run_name={folder.name}"]
    if run.staleness:
        settings += [f"rollout.max_staleness={run.staleness}", f"rollout.ahead={run.staleness}"]
    paths = [ROOT, *([] if run.corrected else [HERE, work / "plugin"])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, os.environ.get("PYTHONPATH", "")]))}
    command = [Path(sys.executable).with_name("rlcore"), "train", str(variant.config), *settings]
    started, cpu, cpu_at = time.perf_counter(), 0.0, {}
    with (
        (work / f"{folder.name}.log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            cpu = max(cpu, cpu_seconds(process.pid))  # the time of workers is lost when Ray ends
            metrics = folder / "metrics.jsonl"
            rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            for row in range(len(cpu_at), rows):
                cpu_at[row] = round(cpu, 1)
            time.sleep(0.25)
    if process.returncode != 0:
        raise SystemExit(f"{run.label}: exit code {process.returncode}, see {work / f'{folder.name}.log'}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    cost = {
        "commit": commit.stdout.strip(),
        "overrides": [*variant.overrides, *(value for value in start if not value.startswith(("policy.model_name", "data.")))],
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(cpu, 1),
        "load": [round(load, 1) for load in os.getloadavg()],
        "cpu_at_row": list(cpu_at.values()),
    }
    (folder / "cost.json").write_text(json.dumps(cost), encoding="utf-8")


def summary(run: Run, work: Path) -> dict[str, Any]:
    """Values of each step, held-out success, and how often reward and success differ in all rollouts.

    `seconds` and `cpu_seconds` (of all processes) count from the end of the validation before the first step.
    """
    folder = run.folder(work)
    rows = read_jsonl(folder / "metrics.jsonl")
    cost = json.loads((folder / "cost.json").read_text(encoding="utf-8"))
    cpu_at = [*cost.pop("cpu_at_row"), *[cost["cpu_s"]] * len(rows)]
    first = next(number for number, row in enumerate(rows) if row["step"] > 0)
    steps, seconds, cpu = rows[first:], [0.0], []
    for number, row in enumerate(steps, first):
        seconds.append(seconds[-1] + row["time/step_s"])
        cpu.append(round(cpu_at[number] - cpu_at[max(first - 1, 0)], 1))
    held_out = [row for row in rows if "validation/reward" in row]
    validated = int(held_out[-1]["validation/rows"])
    final = held_out[-1]["validation/reward"]
    at = {0: 0.0, **{row["step"]: time for row, time in zip(steps, seconds[1:], strict=True)}}
    return {
        **cost,
        "held_out_step": [row["step"] for row in held_out],
        "held_out_seconds": [round(at[row["step"]], 2) for row in held_out],
        "held_out": [round(row["validation/reward"], 4) for row in held_out],
        "held_out_rows": validated,
        "held_out_interval": [round(value, 4) for value in wilson(round(final * validated), validated)],
        "step": [row["step"] for row in steps],
        "seconds": [round(value, 2) for value in seconds[1:]],
        "cpu_seconds": cpu,
        "reward": [round(row["reward/mean"], 4) for row in steps],
        "staleness_mean": [round(row["staleness/steps_mean"], 3) for row in steps],
        "staleness_max": [int(row["staleness/steps_max"]) for row in steps],
        "staleness_kl": [round(row.get("staleness/kl", 0.0), 6) for row in steps],
        "mismatch_max": max(row.get("mismatch/max", 0.0) for row in steps),
        "wait_s": round(sum(row.get("rollout/wait_s", 0.0) for row in steps), 1),
        "training": disagreements(folder, VARIANTS[run.variant].task),
    }


def write_results(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """One line per value of a run."""
    runs = []
    for label, values in results.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        runs.append(f" {json.dumps(label)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(runs) + "\n}\n", encoding="utf-8")


def points(found: Sequence[Mapping[str, Any]], metric: str, axis: str) -> list[tuple[float, float]]:
    """The mean over seeds at each validation, or of the training reward of the steps since the one before."""
    curves = []
    for result in found:
        steps = result["held_out_step"]
        x = steps if axis == "step" else result["held_out_seconds"]
        y = result["held_out"]
        if metric == "reward/mean":
            x, groups = x[1:], pairwise(steps)
            y = [statistics.mean(result["reward"][low:high]) for low, high in groups]
        curves.append(list(zip(x, y, strict=True)))
    return [tuple(map(statistics.mean, zip(*same, strict=True))) for same in zip(*curves, strict=False)]


def draw(results: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> None:
    """Curves of each variant by step and by second: the mean over its seeds."""
    for name in dict.fromkeys(run.variant for run in runs):
        modes = defaultdict(list)
        for run in runs:
            if run.variant == name:
                modes[run.mode].append(results[run.label])
        metrics = {"validation/reward": "held-out", "reward/mean": "reward"}
        for metric, ending in metrics.items() if name == "grpo" else [*metrics.items()][:1]:
            for axis in ("step", "second"):
                with tempfile.TemporaryDirectory() as folder:
                    curves = []
                    for number, (mode, found) in enumerate(modes.items()):
                        path = Path(folder) / str(number)
                        path.mkdir()
                        lines = [json.dumps({"step": round(x), metric: y}) for x, y in points(found, metric, axis)]
                        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
                        curves.append(f"{mode}={path}")
                    file = f"learning-staleness-{name.replace('_', '-')}-{ending}-by-{axis}.svg"
                    command = [sys.executable, ROOT / "docs" / "make_curves.py", ROOT / "docs" / "curves" / file, metric]
                    subprocess.run([*command, *curves, "--by", axis], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=[*VARIANTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning" / "staleness")
    parser.add_argument("--summary", action="store_true", help="write the results of the finished runs, and train none")
    parser.add_argument("--no-results", action="store_true", help="write nothing outside the work folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all configs")
    chosen = parser.parse_intermixed_args()
    work = chosen.work.resolve()
    install(work / "plugin")
    runs = [
        Run(variant=name, staleness=k, corrected=corrected, seed=seed)
        for name in chosen.variants
        for seed in chosen.seeds
        for k, corrected in VARIANTS[name].modes
    ]
    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS", "all")}
    output = work / "results.json" if chosen.no_results else ROOT / "benchmarks" / "results" / "learning_staleness.json"
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for run in runs:
        start = list(chosen.overrides)
        if run.variant == "guess" and not chosen.summary:
            data = write_data(run_task := TASKS["guess"], work)
            start = [f"policy.model_name={warm_up('guess', run_task, work, data)}", *data, *start]
        if not chosen.summary:
            train(run, work, start)
        if (run.folder(work) / "cost.json").exists():
            results[run.label] = {**facts, **summary(run, work)}
            write_results(output, results)
            print(run.label, results[run.label]["held_out"], results[run.label]["training"], flush=True)
    write_review(work / "review.md", [run.folder(work) for run in runs if (run.folder(work) / "cost.json").exists()])
    if not chosen.no_results:
        draw(results, [run for run in runs if run.label in results])


if __name__ == "__main__":
    main()
