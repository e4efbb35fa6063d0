"""Writes the results of an evaluation as JSON, and its prompts as JSON lines. docs/evaluation.md lists the keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_train.evaluation.evaluate import EvaluatedWeights, EvaluationPlan, EvaluationResult, ModeResult
from rl_train.files import write_atomically
from rl_train.rollouts.evaluation import Group, Scores
from rl_train.rollouts.records import rollout_records
from rl_train.run_folders.run_folder import environment

FORMAT = 2
"""Version of the JSON; increased when a key is removed or changes its meaning."""
FOLDER = "eval"
"""Folder of evaluations in a run folder."""


def default_path(plan: EvaluationPlan) -> Path | None:
    """`eval/step_000010.json` in the run folder of the checkpoint, with `-2`, `-3` if it exists; None without a run folder."""
    if plan.checkpoint is None or plan.checkpoint.run_folder is None:
        return None
    folder = plan.checkpoint.run_folder / FOLDER
    stem, number = plan.checkpoint.path.name, 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    return path


def prompts_path(path: Path) -> Path:
    """Path of the prompts of the results in `path`."""
    return path.with_name(f"{path.stem}.prompts.jsonl")


def write_results(path: Path, evaluated: EvaluationResult, plan: EvaluationPlan) -> None:
    """Write the prompts, then the results, so that both are complete if the results exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with prompts_path(path).open("w", encoding="utf-8") as lines:
        for record in prompt_records(evaluated, plan):
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
    write_atomically(path, json.dumps(as_json(evaluated, plan, path), indent=1, ensure_ascii=False).encode())


def as_json(evaluated: EvaluationResult, plan: EvaluationPlan, path: Path) -> dict[str, Any]:
    """The results without the prompts."""
    return {
        "format": FORMAT,
        "weights": _weights(evaluated.weights, plan),
        "dataset": plan.dataset_name,
        "validation_set": plan.validation_set,
        "reward_above": plan.reward_above,
        "modes": [_pass(one, plan) for one in evaluated.passes],
        "prompts": prompts_path(path).name,
        "config_file": str(plan.loaded.path),
        "overrides": list(plan.loaded.overrides),
        "config": plan.loaded.redacted,
        "environment": environment(plan.manager),
    }


def prompt_records(evaluated: EvaluationResult, plan: EvaluationPlan) -> Iterator[dict[str, Any]]:
    """One record per prompt and evaluation mode, with all its samples."""
    for one in evaluated.passes:
        for group in one.groups:
            yield {"mode": one.mode.name, "dataset": plan.dataset_name, **_group(group)}


def _weights(weights: EvaluatedWeights, plan: EvaluationPlan) -> dict[str, Any]:
    checkpoint = weights.checkpoint
    if weights.transport is None:
        engine = plan.loaded.run.policy.generation
        assert engine is not None
        unknown = dict.fromkeys(("step", "version", "fingerprint", "transport"))
        return {"source": "engine", "path": engine.model_name or plan.loaded.run.policy.model_name, **unknown}
    return {
        "source": "config" if checkpoint is None else "checkpoint" if checkpoint.is_checkpoint else "model",
        "path": plan.loaded.run.policy.model_name if checkpoint is None else str(checkpoint.path),
        "step": None if checkpoint is None else checkpoint.step,
        "version": weights.version,
        "fingerprint": weights.fingerprint,
        "transport": weights.transport,
    }


def _pass(evaluated: ModeResult, plan: EvaluationPlan) -> dict[str, Any]:
    section = plan.loaded.run.policy.generation
    assert section is not None
    return {
        "mode": evaluated.mode.name,
        "temperature": 0.0 if evaluated.mode.greedy else section.temperature,
        "seconds": round(evaluated.seconds, 3),
        "all": _scores(evaluated.scores),
        "by_task": {task: _scores(scores) for task, scores in evaluated.by_task.items()},
        "by_dataset": {name: _scores(scores) for name, scores in evaluated.by_dataset.items()},
        "environments": evaluated.environment,
    }


def _scores(scores: Scores) -> dict[str, Any]:
    return {
        "num_prompts": scores.num_prompts,
        "samples_per_prompt": scores.samples_per_prompt,
        "metrics": {
            name: {"value": estimate.value, "standard_error": estimate.standard_error}
            for name, estimate in scores.metrics.items()
        },
        "max_length": scores.max_length,
        "num_truncated_prompts": scores.num_truncated_prompts,
        "not_reported": dict(scores.not_reported),
    }


def _group(group: Group) -> dict[str, Any]:
    records = rollout_records(group.rows)
    return {
        "task": group.task_name,
        "index": records[0]["index"],
        "prompt": records[0]["prompt"],
        "prompt_truncated": group.is_truncated,
        "expected_answer": records[0]["expected_answer"],
        "completions": [record["completion"] for record in records],
        "answers": group.answers,
        "correct": None if group.correct is None else list(group.correct),
        "rewards": [record["reward"] for record in records],
        "reward_parts": [record["reward_parts"] for record in records],
        "lengths": group.lengths,
        "truncated": [record["truncated"] for record in records],
        "turns": [record["turns"] for record in records],
    }
