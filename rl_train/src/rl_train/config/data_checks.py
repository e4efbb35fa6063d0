"""Checks that the configured datasets have the record kind that the algorithm reads. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.source_tree import KeyPath
from rl_core.plugins.static_lookup import missing_target
from rl_train.config.schema import RunConfig
from rl_train.prompts.prompt_files import prompt_problem

_KINDS = {"conversations": "prompts or conversations", "pairs": "pairs of a chosen and a rejected answer"}


def data_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Datasets with the wrong record kind or for a missing task, processors that cannot be imported, and missing templates."""
    wanted = "pairs" if run.algorithm.needs_preferences else "conversations"
    for key, section in run.data.sections().items():
        at: KeyPath = ("data", *key.split(".", 1))
        if section.processor is not None and (problem := missing_target(section.processor)) is not None:
            yield (*at, "processor"), f"{section.processor} cannot be imported: {problem}"
        if key.startswith("validation") and not validates(run):
            continue
        if section.record_kind not in (None, wanted):
            remedy = "`preference` reads pairs from JSON lines" if wanted == "pairs" else "`jsonl` reads JSON lines"
            yield (
                (*at, "dataset_name"),
                f"{section.dataset_name} has {_KINDS[str(section.record_kind)]}, but {run.algorithm_name} needs "
                f"{_KINDS[wanted]}. Use another dataset: {remedy}.",
            )
        is_scored = key.startswith("validation") or run.algorithm.runtime_needs.rollouts is not None
        if run.env and is_scored and section.task_name is not None and section.task_name not in run.env:
            yield (*at, "task_name"), f"`env` has no task {section.task_name!r}. Tasks in `env`: {', '.join(run.env)}."
    yield from _prompt(run)


def validates(run: RunConfig) -> bool:
    """Whether validation is enabled."""
    algorithm = run.algorithm
    has_period = algorithm.val_period > 0 or any(section.val_period for section in run.data.validation_sets.values())
    return has_period or algorithm.val_at_start or algorithm.val_at_end


def _prompt(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the prompt config and the examples of `data.prompt`."""
    prompt = run.data.prompt
    if prompt is None:
        return
    if prompt.prompt_config is not None:
        if (problem := prompt_problem(prompt.prompt_config)) is not None:
            yield ("data", "prompt", "prompt_config"), problem
        elif problem := prompt_problem(prompt.prompt_config, prompt.examples_type):
            yield ("data", "prompt", "examples_type"), problem
    elif prompt.examples_type and not any(getattr(section, "prompt", None) for section in run.data.sections().values()):
        yield ("data", "prompt", "examples_type"), "has no effect without a prompt config: set `prompt_config`."
