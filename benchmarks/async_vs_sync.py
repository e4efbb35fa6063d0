"""Seconds per step with `rollout.max_staleness` against synchronous training.

    python benchmarks/async_vs_sync.py sleeping --rounds 2
    python benchmarks/async_vs_sync.py turns --rounds 2
    python benchmarks/async_vs_sync.py compute --rounds 2
    python benchmarks/async_vs_sync.py driver

`sleeping`: engine and policy spend their time asleep (`sleeping_parts.py`): 32 slots, 8 x 4 rows, lognormal times of rows, 2 s
of training. The limit is the prediction of `schedule_time.py` for the same row times, with the measured duration of a refit.
`turns`: the quickstart's model over Ray with 8 x 4 rows of 1 to 4 turns; each response of the environment takes a lognormal
time (median 0.5 s, sigma 1). `compute`: the same without waiting, with 64 x 8 rows, so the processor is the limit; policy and
engine have the same two cores and take turns.
`driver`: 1,024 rollouts in progress on 8 sleeping replicas; CPU time of the driver per turn, and occupied slots.

Runs alternate in rounds, each in its own process, because other work on the machine changes between them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cpu_time import cpu_seconds
from driver_cost import driver_cost
from schedule_time import simulate
from sleeping_parts import SLOTS, TRAIN_S, row_seconds

from rl_train.metrics.jsonl import read_jsonl
from rl_train.rollouts.trajectory import SampleStream, rollout_seed

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "grpo_addition.yaml"
SEED, PROMPTS, GROUP = 3, 8, 4
WARM_UP = 4
"""Steps that are not counted: the first refit runs the canary, and up to three more stream it."""
SMALL = [
    f"grpo.seed={SEED}",
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={GROUP}",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "cluster.backend=ray",
    "++loss_fn.ratio_to=sampler",
    "checkpointing.enabled=false",
]
SLEEPING = [
    "policy.backend=sleeping_parts.Policy",
    "policy.generation.backend=sleeping_parts.Generation",
    "policy.generation.max_new_tokens=2",
]
TURNS = [
    "env.arithmetic.env_cls=slow_sums.SlowSums",
    f"env.arithmetic.max_concurrency={2 * PROMPTS * GROUP}",
    "grpo.max_rollout_turns=4",
    "policy.max_total_sequence_length=64",
]

COMPUTE = ["grpo.num_prompts_per_step=64", "grpo.num_generations_per_prompt=8"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    step_s: float
    """Mean duration of a step, without `WARM_UP`."""
    cpu_s: float
    """CPU-seconds of all processes, start-up included."""
    staleness: float
    """Largest staleness in steps."""
    refit_s: float
    """Median duration of a refit."""
    trainer_idle: float
    engine_idle: float
    load: float


def run(overrides: Sequence[str], *, steps: int, k: int, ahead: int) -> Result:
    """One run of `rlcore train` in its own process."""
    rollout = [f"rollout.max_staleness={k}", f"rollout.ahead={ahead}"] if k else []
    with tempfile.TemporaryDirectory() as folder:
        settings = [*overrides, *rollout, f"grpo.max_num_steps={steps}", f"logger.log_dir={folder}", "logger.run_name=run"]
        command = [str(Path(sys.executable).with_name("rlcore")), "train", str(EXAMPLE), *settings]
        environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        cpu = 0.0
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                cpu = max(cpu, cpu_seconds(process.pid))  # the time of workers is lost when Ray ends
                time.sleep(1.0)
        if process.returncode != 0:
            raise SystemExit(f"exit code {process.returncode}")
        rows = [row for row in read_jsonl(Path(folder) / "run" / "metrics.jsonl") if row["step"] > WARM_UP]
    mean = {
        name: statistics.mean(row[name] for row in rows) for name in ("time/step_s", "trainer/idle_frac", "engine/idle_frac")
    }
    return Result(
        step_s=mean["time/step_s"],
        cpu_s=cpu,
        staleness=max(row["staleness/steps_max"] for row in rows),
        refit_s=statistics.median(row["refit/total_s"] for row in rows),
        trainer_idle=mean["trainer/idle_frac"],
        engine_idle=mean["engine/idle_frac"],
        load=os.getloadavg()[0],
    )


def predicted(steps: int, k: int, ahead: int, refit_s: float) -> float:
    """The seconds per step of `sleeping`, without the first ones, for the row times of these very runs."""

    def seconds(ordinal: int, sample: int) -> float:
        return row_seconds(rollout_seed(SEED, SampleStream.TRAINING, ordinal=ordinal, sample=sample, turn=0))

    run = simulate(
        seconds,
        steps=steps,
        slots=SLOTS,
        train_s=TRAIN_S,
        refit_s=refit_s,
        max_staleness=k,
        ahead=ahead,
        prompts=PROMPTS,
        group_size=GROUP,
    )
    return (run[-1].end - run[WARM_UP - 1].end) / (steps - WARM_UP)


def compare(
    modes: Mapping[tuple[int, int], Sequence[str]],
    *,
    rounds: int,
    steps: int,
    predict: Callable[[int, int, float], float] | None = None,
) -> None:
    """Alternate the modes, by k and `ahead`, and print a row for each run and the medians."""
    columns = ["round", "k", "ahead", "s per step", "limit s", "slower", "CPU-s", "trainer idle", "engine idle", "refit s"]
    columns += ["largest staleness", "load"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    results: dict[tuple[int, int], list[Result]] = {mode: [] for mode in modes}
    for number in range(rounds):
        for k, ahead in list(modes) if number % 2 == 0 else reversed(list(modes)):
            result = run(modes[k, ahead], steps=steps, k=k, ahead=ahead)
            results[k, ahead].append(result)
            limit = predict(k, ahead, result.refit_s) if predict is not None else None
            limits = f"{limit:.2f} | {result.step_s / limit - 1:+.1%}" if limit is not None else "- | -"
            print(
                f"| {number} | {k} | {ahead} | {result.step_s:.2f} | {limits} | {result.cpu_s:.0f} | "
                f"{result.trainer_idle:.0%} | {result.engine_idle:.0%} | {result.refit_s:.2f} | {result.staleness:.0f} | "
                f"{result.load:.0f} |",
                flush=True,
            )
    medians = {mode: statistics.median(result.step_s for result in found) for mode, found in results.items()}
    print()
    for (k, ahead), median in medians.items():
        speed = medians[0, 0] / median
        print(f"k = {k}, ahead = {ahead}: median {median:.2f} s per step, {speed:.2f} times the synchronous speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("sleeping", "turns", "compute", "driver"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    chosen = parser.parse_args()
    started = time.strftime("%H:%M")
    if chosen.part == "driver":
        print(json.dumps(driver_cost(), indent=1))
    elif chosen.part == "sleeping":
        settings = [*SMALL, *SLEEPING, "++cluster.cpus_per_worker=1"]
        modes = {(0, 0): settings, (1, 1): settings, (2, 1): settings}
        compare(modes, rounds=chosen.rounds, steps=chosen.steps, predict=partial(predicted, chosen.steps))
    else:
        settings = [*SMALL, *(TURNS if chosen.part == "turns" else COMPUTE)]
        two, one = [*settings, "++cluster.cpus_per_worker=2"], [*settings, "++cluster.cpus_per_worker=1"]
        asynchronous = two if chosen.part == "compute" else one
        compare({(0, 0): two, (1, 1): asynchronous, (2, 2): asynchronous}, rounds=chosen.rounds, steps=chosen.steps)
    print(f"\nstarted {started}, load averages at the end {', '.join(f'{load:.0f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
