"""Datasets: the records that the algorithm reads, their tasks, processors and prompts."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import DatasetConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.import_path import missing_target
from rl_train.config.rules.required_sections import validates
from rl_train.config.rules.rule import CONFIG_FILE, CheckedConfig, Use, rule
from rl_train.prompts.prompt_files import prompt_problem

_KINDS = {"conversations": "prompts or conversations", "pairs": "pairs of a chosen and a rejected answer"}


def each_dataset(config: CheckedConfig) -> Iterator[tuple[str, KeyPath, DatasetConfig]]:
    """The datasets of a config: the key within `data`, the whole key and the section."""
    for key, section in config.run.data.sections().items():
        yield key, ("data", *key.split(".", 1)), section


def _is_used(config: CheckedConfig, key: str) -> bool:
    return not key.startswith("validation") or config.use is not Use.TRAIN or validates(config.run)


@rule("data", each=each_dataset, applies_to=CONFIG_FILE)
def processor_can_be_imported(config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig) -> Iterator[Problem]:
    """The processor of a dataset exists."""
    if section.processor is not None and (problem := missing_target(section.processor)) is not None:
        yield Problem((*path, "processor"), f"{section.processor} cannot be imported: {problem}")


@rule("algorithm", "data", each=each_dataset, applies_to=frozenset({Use.TRAIN}))
def records_are_of_the_kind_that_is_read(
    config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig
) -> Iterator[Problem]:
    """Datasets have pairs of answers if the algorithm reads pairs, and prompts or conversations otherwise."""
    run = config.run
    wanted = "pairs" if run.algorithm.needs_preferences else "conversations"
    if section.record_kind in (None, wanted) or not _is_used(config, key):
        return
    remedy = "`preference` reads pairs from JSON lines" if wanted == "pairs" else "`jsonl` reads JSON lines"
    yield Problem(
        (*path, "dataset_name"),
        f"{section.dataset_name} has {_KINDS[str(section.record_kind)]}, but {run.algorithm_name} needs "
        f"{_KINDS[wanted]}. Use another dataset: {remedy}.",
    )


@rule("algorithm", "data", "env", each=each_dataset, applies_to=CONFIG_FILE)
def task_of_a_dataset_has_an_environment(
    config: CheckedConfig, key: str, path: KeyPath, section: DatasetConfig
) -> Iterator[Problem]:
    """The task of a dataset whose rows are scored is a task of `env`."""
    env = config.run.env
    is_scored = key.startswith("validation") or config.run.algorithm.runtime_needs.rollouts is not None
    if env and is_scored and section.task_name is not None and section.task_name not in env and _is_used(config, key):
        yield Problem((*path, "task_name"), f"`env` has no task {section.task_name!r}. Tasks in `env`: {', '.join(env)}.")


@rule("data.prompt", applies_to=CONFIG_FILE)
def prompt_config_exists(config: CheckedConfig) -> Iterator[Problem]:
    """The prompt config and the few-shot examples of `data.prompt` exist and fit together."""
    data = config.run.data
    if data.prompt is None:
        return
    name, examples = data.prompt.prompt_config, data.prompt.examples_type
    if name is not None:
        if (problem := prompt_problem(name)) is not None:
            yield Problem(("data", "prompt", "prompt_config"), problem)
        elif problem := prompt_problem(name, examples):
            yield Problem(("data", "prompt", "examples_type"), problem)
    elif examples and not any(getattr(section, "prompt", None) for section in data.sections().values()):
        yield Problem(("data", "prompt", "examples_type"), "has no effect without a prompt config: set `prompt_config`.")
