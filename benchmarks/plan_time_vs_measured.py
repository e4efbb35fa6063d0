"""Compares the time of a step that `rlcore plan` predicts with measurements.

    python benchmarks/plan_time_vs_measured.py            # all configs; writes results/plan_vs_measured_time.json and .md
    python benchmarks/plan_time_vs_measured.py full ray   # some of them; replaces their rows

Configs are those of plan_vs_measured.py and some more. Each trains four steps of a randomly initialized model, whose
completions have full length. Seconds are the median of the steps after the first. Processes have one thread, unless the name of
the config begins with `two_threads`. Use an idle machine, because other processes delay the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from plan_vs_measured import CASES as MEMORY_CASES
from plan_vs_measured import FEW_TOKENS, RESULTS, Case, measure, with_suggestions, write_inputs

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.plan.time_plan import plan_time

PATH = RESULTS.with_name(RESULTS.name + "_time.json")
FACTOR = 1.5
HEAD = """# Predicted and measured time of a step

Written by `benchmarks/plan_time_vs_measured.py`; see there for the configs and how they are measured.

"""
_RAY = {"cluster.backend": "ray", "++cluster.cpus_per_worker": 1}
_TWO_RANKS = {**_RAY, "++cluster.workers_per_node": 2}
_MEGATRON = {"policy.backend": "megatron"}
_VLLM = {**_RAY, "policy.generation.backend": "vllm"}
_SIX_LAYERS = {"num_hidden_layers": 6}
CASES = {
    **{name: MEMORY_CASES[name] for name in ("full", "lora", "large_vocabulary", "bfloat16", "ppo", "shared_prefix")},
    **{name: MEMORY_CASES[name] for name in ("wide_layers", "suggested_microbatch", "suggested_adapters")},
    "two_threads": Case(shape=_SIX_LAYERS),
    "ray": Case(overrides=_RAY, shape=_SIX_LAYERS),
    "ray_two_ranks": Case(overrides=_TWO_RANKS, shape=_SIX_LAYERS),
    "ray_fsdp2": Case(overrides={**_TWO_RANKS, "++policy.hf_cfg.data_parallel": "fsdp2"}, shape=_SIX_LAYERS),
    "megatron_tp2": Case(
        overrides={**_TWO_RANKS, **_MEGATRON, "++policy.megatron_cfg.tensor_model_parallel_size": 2}, shape=_SIX_LAYERS
    ),
    "megatron_pp2": Case(
        overrides={**_TWO_RANKS, **_MEGATRON, "++policy.megatron_cfg.pipeline_model_parallel_size": 2}, shape=_SIX_LAYERS
    ),
    "vllm": replace(MEMORY_CASES["vllm"], overrides={**MEMORY_CASES["vllm"].overrides, **_VLLM}),
    "vllm_more_rows": Case(overrides=_VLLM, shape=_SIX_LAYERS),
    "vllm_bfloat16": Case(overrides={**_VLLM, **FEW_TOKENS, "policy.precision": "bfloat16"}, shape=_SIX_LAYERS),
}


def predict(arguments: list[str], registry: Registry) -> dict[str, Any]:
    """Predicted seconds of a step, and of its phases."""
    run = load_config([Path(arguments[0])], arguments[1:], registry=registry).run
    plan = plan_time(run, registry)
    return {"predicted": plan.seconds, "phases": dict(plan.phases), "not_predicted": dict(plan.not_predicted)}


def compare(case: Case, registry: Registry) -> dict[str, Any]:
    """Predicted and measured seconds of a step."""
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        section = "ppo" if "ppo" in case.sections else "grpo"
        given = [*with_suggestions(case, write_inputs(case, folder), registry), f"{section}.max_num_steps=4"]
        predicted = predict(given, registry)
        measure([str(Path(sys.executable).with_name("rlcore")), "train", *given], folder)
        lines = (folder / "runs" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "time/step_s" in step][1:]
    phases = {name for step in steps for name in step if name.startswith("time/")}
    return predicted | {
        "seconds": median(step["time/step_s"] for step in steps),
        "measured_phases": {name: median(step.get(name, 0.0) for step in steps) for name in sorted(phases)},
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as Markdown, in seconds."""
    lines = ["| config | predicted | measured | ratio |", "|---|---|---|---|"]
    ratios = []
    for case, row in results.items():
        if row["predicted"] is None:
            predicted, ratio = "-", "-"
        else:
            ratios.append(row["predicted"] / row["seconds"])
            predicted, ratio = f"{row['predicted']:.2f}", f"{ratios[-1]:.2f}"
        lines.append(f"| {case} | {predicted} | {row['seconds']:.2f} | {ratio} |")
    within = sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    reasons = {reason for row in results.values() for reason in row["not_predicted"].values()}
    lines.append(f"\n{within} of {len(ratios)} predictions are within a factor of {FACTOR} of the measured seconds.")
    return "\n".join([*lines, *(f"\nNot predicted: {reason}." for reason in sorted(reasons))]) + "\n"


def main() -> None:
    """Compare the chosen configs, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CONFIG", help=f"any of {', '.join(CASES)}; all by default")
    options = parser.parse_args()
    chosen = options.cases or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown configs: {', '.join(sorted(unknown))}")
    registry = Registry(discover())
    for name in chosen:
        threads = 2 if name.startswith("two_threads") else 1
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the run
        found = compare(CASES[name], registry)
        results = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
        results = {case: (results | {name: found})[case] for case in CASES if case in results | {name: found}}
        PATH.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PATH.with_suffix(".md").write_text(HEAD + table(results), encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
