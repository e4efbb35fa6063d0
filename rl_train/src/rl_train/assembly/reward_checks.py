"""Checks of reward functions with the first row of the data, before a run starts workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, RLCoreError, with_key
from rl_core.event_loop import finished
from rl_core.plugins.component import did_you_mean
from rl_train.assembly.data import Source
from rl_train.config.schema import RunConfig
from rl_train.data.conversations import without_answer
from rl_train.data.holdout import row_location
from rl_train.pools.pausing_loop import running_loop
from rl_train.rewards.config import FunctionEnvironmentConfig
from rl_train.rewards.environment import load_functions, row_of
from rl_train.rewards.functions import RewardFunction, RewardFunctionError

_TRIED_ROWS = 16
"""Number of rows that are tried if no function gives a reward for the first one."""


def resolve_completion_formats(config: RunConfig, *sources: Source | None) -> RunConfig:
    """The config with `completion_format: auto` replaced by the format that fits the data of each task.

    Args:
        config: the run.
        sources: the training and the validation data; None if there is none.
    """
    env = {task: _with_format(section, task, sources, list(config.env)) for task, section in config.env.items()}
    return config.model_copy(update={"env": env})


def check_reward_functions(config: RunConfig, *sources: Source | None) -> None:
    """Try every reward function with the first row of the data of its task.

    Each function is tried with two completions: the expected answer, if the row has one, and an empty text.

    Args:
        config: the run.
        sources: the training and the validation data; None if there is none.

    Raises:
        ConfigError: a function does not exist, requires a field that the row does not have, raised, or returned something that
            is not a reward, or a weight has the name of no reward.
    """
    for task in config.env:
        check_reward_functions_of(task, config, *sources)


def check_reward_functions_of(task: str, config: RunConfig, *sources: Source | None) -> None:
    """Try the reward functions of one task, see `check_reward_functions`."""
    tasks = list(config.env)
    section = _with_format(config.env[task], task, sources, tasks)
    if isinstance(section, FunctionEnvironmentConfig):
        source = first_source(task, sources, tasks=tasks)
        with with_key(f"env.{task}"):
            functions = _loaded(section, task)
            if source is not None:
                _try_all(functions, section, task, source)


def _with_format(
    section: EnvironmentConfig, task: str, sources: Sequence[Source | None], tasks: Sequence[str]
) -> EnvironmentConfig:
    if not isinstance(section, FunctionEnvironmentConfig) or section.completion_format != "auto":
        return section
    source = first_source(task, sources, tasks=tasks)
    as_messages = source is not None and is_conversational(source.records)
    return section.model_copy(update={"completion_format": "messages" if as_messages else "text"})


def try_functions(functions: Sequence[RewardFunction], source: Source, *, as_messages: bool) -> set[str]:
    """Call each function with the first row of the data; returns the names of the rewards.

    Raises:
        ConfigError: see `check_reward_functions`.
    """
    return {name for function in functions for name in _try(function, source, as_messages=as_messages)}


def check_weights(weights: Mapping[str, float], names: set[str]) -> None:
    """Check that every weight has the name of a reward.

    Raises:
        ConfigError: a weight has the name of no reward.
    """
    for name in weights:
        if name not in names:
            raise ConfigError(
                f"`reward_weights` has the name {name!r}, but the rewards are {', '.join(sorted(names))}."
                f"{did_you_mean(name, sorted(names))}"
            )


def is_conversational(records: Any) -> bool:
    """Whether the prompts of a dataset are lists of messages, and not texts."""
    prompts = getattr(records, "prompt_of", None)
    return prompts is not None and len(records) > 0 and isinstance(prompts(0), list)


def _loaded(section: FunctionEnvironmentConfig, task: str) -> list[RewardFunction]:
    try:
        return load_functions(section)
    except ConfigError as error:
        error.key = f"env.{task}.{error.key}"
        raise


def _try_all(functions: Sequence[RewardFunction], section: FunctionEnvironmentConfig, task: str, source: Source) -> None:
    names: set[str] = set()
    as_messages = section.completion_format == "messages"
    for function in functions:
        with with_key(".".join(["env", task, *map(str, section.key_of(function.name))])):
            names |= _try(function, source, as_messages=as_messages)
    others = range(1, min(_TRIED_ROWS, len(source.records)))
    if not names and not any(
        _try(function, source, as_messages=as_messages, row=row) for row in others for function in functions
    ):
        with with_key(".".join(["env", task, *map(str, section.key_of(functions[0].name))])):
            raise ConfigError(
                f"{' and '.join(function.name for function in functions)} returned None for the expected answers of the first "
                f"{1 + len(others)} rows and for an empty completion, so nothing would be scored. A function without `return` "
                "returns None: return a number."
            )
    names |= set(section.reward_names)
    with with_key(f"env.{task}.reward_weights"):
        check_weights(section.reward_weights, names)


def _try(function: RewardFunction, source: Source, *, as_messages: bool, row: int = 0) -> set[str]:
    record = source.records[row]
    info = record.get("extra_env_info")
    expected = info.get("expected_answer") if isinstance(info, Mapping) else None
    texts = ["" if expected is None else str(expected), ""]
    prompt = without_answer(record["messages"])
    rows = [row_of([*prompt, {"role": "assistant", "content": text}], info) for text in texts]
    try:
        if function.is_async or running_loop() is not None:  # in a notebook, a loop runs in this thread
            score = function.score_async if function.is_async else function.score
            with ThreadPoolExecutor(1) as thread:
                scores = thread.submit(lambda: finished(score(rows, as_messages=as_messages))).result()
        else:
            scores = function.score(rows, as_messages=as_messages)
    except ConfigError:
        raise
    except (RLCoreError, RewardFunctionError) as error:
        formats = " `completions` were lists of messages" if as_messages else " `completions` were texts"
        other = "text" if as_messages else "messages"
        hint = f"{formats}; `completion_format: {other}` changes that." if function.is_batched else ""
        location = row_location(source.records, row)
        raise ConfigError(f"{str(error).rstrip('.')}. It was called with {location} of the data.{hint}") from error
    return {name for rewards in scores for name in rewards or ()}


def first_source(task: str, sources: Sequence[Source | None], *, tasks: Sequence[str]) -> Source | None:
    """The first dataset with records of a task; None if there is none."""
    return next(sources_of(task, sources, tasks=tasks), None)


def sources_of(task: str, sources: Sequence[Source | None], *, tasks: Sequence[str]) -> Iterator[Source]:
    """The datasets whose first record is of a task; a mixture is several datasets."""
    for source in _members(sources):
        if not len(source.records) or "messages" not in source.records[0]:
            continue
        named = source.task_name or source.records[0].get("task_name")
        if named == task or (named not in tasks and len(tasks) == 1):
            yield source


def _members(sources: Sequence[Source | None]) -> Iterator[Source]:
    for source in sources:
        if source is not None:
            yield from [source] if source.members is None else source.members.values()
