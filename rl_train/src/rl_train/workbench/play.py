"""Plays rollouts against an environment without a model (`rlcore env play`): a person, a script or a random player answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import isroutine
from pathlib import Path
from typing import Any

import yaml

from rl_core.config.schema import EnvironmentConfig
from rl_core.config.validator import section_of_values
from rl_core.errors import ComponentImportError, ConfigError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import ToolCall, messages_of
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import EnvironmentTrial, LocalRollouts, TrialRow, environment_component, trial_row
from rl_train.assembly.checks import sources_of
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config
from rl_train.config.schema import section_of
from rl_train.config.slots import FUNCTIONS
from rl_train.data.conversations import read_messages, without_answer
from rl_train.data.holdout import row_location
from rl_train.data.image_sources import image_parts
from rl_train.data.rows import JsonLines
from rl_train.pools.elsewhere import find_environment
from rl_train.tools.parsers import read_call
from rl_train.workbench.instances import environment_factory

Player = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Returns the next answer to a conversation, or None to stop."""

OnOpen = Callable[[Sequence[Mapping[str, Any]]], None]

REPEATED_TURNS = 20
"""Maximum number of turns of a rollout whose answers are all equal."""
_CALL = re.compile(r"^/call[ \t]+(\S+)[ \t]*(.*)$", re.MULTILINE)
_PIECE = re.compile(r"[A-Za-z]+|-?\d+")
UNDECLARED_TURNS = 100
"""Maximum number of turns for a class named by its path, which declares no number and may need several."""


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """One turn of a rollout."""

    answer: str
    rewards: Mapping[str, float]
    """Rewards of this turn by name."""
    scored: bool
    parsed: str | None
    """The answer that the environment extracted."""
    ended: bool
    replies: Sequence[Mapping[str, Any]]
    """What the model would read next; empty if the row has ended."""


def play(
    environment: EnvironmentInterface,
    task: str,
    row: TrialRow,
    player: Player,
    *,
    max_turns: int,
    on_open: OnOpen = lambda messages: None,
    has_tools: bool = False,
) -> Iterator[PlayedTurn]:
    """Yields each turn until the environment ends the rollout, `max_turns` is reached, or the player stops.

    Args:
        environment: scores and replies.
        task: task name, for errors.
        row: the prompt and its metadata.
        player: answers.
        max_turns: maximum number of turns.
        on_open: called with the messages that the environment adds to the prompt.
        has_tools: whether lines `/call NAME ARGUMENTS` of an answer are tool calls; the arguments are a JSON object.
    """
    with LocalRollouts(environment, task, [row], session="play") as rollouts:
        on_open(rollouts.logs[0][len(row.messages) :])
        for _ in range(max_turns):
            if rollouts.ended[0] or (answer := player(rollouts.logs[0])) is None:
                return
            text, calls = _with_calls(answer) if has_tools else (answer, [])
            result = rollouts.answer({0: text}, **({"tool_calls": calls} if calls else {}))[0]
            yield PlayedTurn(
                answer=answer,
                rewards=result.rewards,
                scored=result.scored,
                parsed=result.answer,
                ended=result.terminated,
                replies=[] if result.terminated else messages_of(result.observation),
            )


def _with_calls(answer: str) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its tool calls."""
    calls: list[ToolCall] = [
        {**read_call({"name": name, "arguments": text or "{}"}), "id": f"call_{number}"}
        for number, (name, text) in enumerate(_CALL.findall(answer))
    ]
    return _CALL.sub("", answer).strip(), calls


def repeated_answers(
    environment: EnvironmentInterface, trial: EnvironmentTrial, rows: Sequence[TrialRow], answers: Sequence[str]
) -> list[float | None]:
    """The reward of each of B rollouts in which every turn has the same answer; None if a turn was not scored.

    Args:
        environment: an instance of the environment.
        trial: its task, the weights of its rewards and the maximum number of turns, of which at most `REPEATED_TURNS` are used.
        rows: B prompts with their metadata, which are stepped together.
        answers: B answers.
    """
    rewards: list[float | None] = [0.0] * len(rows)
    with LocalRollouts(environment, trial.task, rows, session="repeated") as rollouts:
        for _ in range(min(trial.max_turns, REPEATED_TURNS)):
            active = [row for row, ended in enumerate(rollouts.ended) if not ended]
            for row, result in rollouts.answer({row: answers[row] for row in active}).items():
                if (earlier := rewards[row]) is not None:
                    rewards[row] = earlier + trial.reward_of(result.rewards) if result.scored else None
    return rewards


def scripted_player(answers: Sequence[str]) -> Player:
    """A player that gives these answers and then stops."""
    remaining = iter(answers)
    return lambda log: next(remaining, None)


def random_player(seed: int) -> Player:
    """A player that answers with a random word or number of the conversation."""
    draw = random.Random(seed)

    def answer(log: Sequence[Mapping[str, Any]]) -> str:
        pieces = _PIECE.findall(" ".join(str(message["content"]) for message in log if message["role"] != "assistant"))
        return draw.choice(pieces) if pieces else ""

    return answer


@dataclass(frozen=True, kw_only=True)
class SampledTrial(EnvironmentTrial):
    """An environment, and the first rows of its datasets."""

    total: int
    """Number of rows of the datasets."""
    prepared: Preparation | None = None
    """The run of a config, with the tokenizer whose text the environment gets; None without a config."""


@dataclass(frozen=True, kw_only=True)
class LocatedRow(TrialRow):
    """A row of a dataset."""

    location: str


def open_trial(
    name: str,
    settings: Sequence[str] = (),
    *,
    config: Path | None = None,
    rows: Path | None = None,
    limit: int = 8,
) -> SampledTrial:
    """An environment by name, with rows from a file, from a config, or from the dataset of the same name.

    Args:
        name: a registered environment, the dotted path of an environment class or of a reward function; with `config`, a
            task of its `env` section.
        settings: `key=value` of the environment's section, and `data.key=value` of its dataset; with `config`, overrides.
        config: a config file, whose environment and data are used.
        rows: a JSON Lines file: `messages`, or a text as `prompt`, `question` or `problem`; `extra_env_info` is the metadata,
            or else all other fields.
        limit: maximum number of rows, of each dataset.

    Raises:
        UserError: the environment, the config or the rows cannot be used.
    """
    registry = Registry(discover())
    given = None if rows is None else read_rows(rows, limit=limit)
    if config is not None:
        run = load_config(config, list(settings), registry=registry).run
        if name not in run.env:
            raise ConfigError(f"{config} has no section env.{name}; its tasks are {', '.join(run.env) or 'none'}.")
        prepared = Preparation(run, registry)
        return trial_of_run(name, prepared, *(rows_of_task(name, prepared, limit=limit) if given is None else given))
    section, generated = _by_name(name, settings, registry, limit=0 if given is not None else limit)
    max_turns = section.max_rollout_turns or (UNDECLARED_TURNS if section.env_cls is not None else section.turns_needed)
    chosen, total = generated if given is None else given
    return _trial(name, section, registry, rows=chosen, total=total, max_turns=max_turns)


def rows_of_task(task: str, prepared: Preparation, *, limit: int) -> tuple[list[LocatedRow], int]:
    """First rows of a task and their total number: of the training data, or if it has none, of the first validation set.

    Args:
        task: name of a section of `env`.
        prepared: the run.
        limit: maximum number of rows, of each dataset.
    """
    data, tasks = prepared.data, prepared.config.env
    training = [*sources_of(task, filter(None, [data.train]), tasks=tasks)]
    sources = training or [*sources_of(task, data.validation.values(), tasks=tasks)][:1]
    read = [_rows_of(each.records, limit, name=each.name if len(sources) > 1 else "", prepared=prepared) for each in sources]
    return [row for rows, _ in read for row in rows], sum(total for _, total in read)


def trial_of_run(task: str, prepared: Preparation, rows: Sequence[TrialRow], total: int) -> SampledTrial:
    """A task of a run with rows.

    Raises:
        UserError: the environment cannot be used, or there are no rows.
    """
    run = prepared.scoring_config
    trial = _trial(task, run.env[task], prepared.registry, rows=rows, total=total, max_turns=run.max_turns[task])
    return replace(trial, prepared=prepared)


def _trial(
    task: str, section: EnvironmentConfig, registry: Registry, *, rows: Sequence[TrialRow], total: int, max_turns: int
) -> SampledTrial:
    if not rows:
        raise ConfigError(f"There are no rows for {task!r}: give --rows FILE (JSON Lines), or --config FILE of a run.")
    make, reads_tool_calls = environment_factory(task, section, registry)
    return SampledTrial(
        task=task, section=section, make=make, rows=rows, total=total, max_turns=max_turns, reads_tool_calls=reads_tool_calls
    )


def read_rows(path: Path, *, limit: int) -> tuple[list[TrialRow], int]:
    """The first rows of a JSON Lines file and their total number; see `open_trial` for their form.

    Raises:
        DataError: the file cannot be read, or a row has no prompt.
    """
    lines = JsonLines(path)
    rows = []
    for number in range(min(limit, len(lines))):
        row = lines[number]
        rows.append(trial_row(row, f"{lines.row_location(number)}: the row", read=partial(read_messages, role="user")))
    return rows, len(lines)


def _by_name(
    name: str, settings: Sequence[str], registry: Registry, *, limit: int
) -> tuple[EnvironmentConfig, tuple[Sequence[TrialRow], int]]:
    values, data = _parsed(settings)
    if is_path(name):
        chosen = {"name": FUNCTIONS, "reward_fn": name} if _is_function(name) else {"env_cls": name}
    else:
        chosen = {"name": name}
    name_or_path, python = chosen.get("name") or name, values.get("python")
    component = find_environment(name_or_path, python, registry) if python else environment_component(name_or_path, registry)
    section = section_of_values(section_of(component, Kind.ENVIRONMENT), {**chosen, **values}, name=f"env.{name}")
    assert isinstance(section, EnvironmentConfig)
    return section, _generated_rows(name, data, registry, limit)


def _is_function(path: str) -> bool:
    try:
        return isroutine(Component.from_path(path).load())
    except ComponentImportError:
        return False


def _generated_rows(name: str, values: Mapping[str, Any], registry: Registry, limit: int) -> tuple[Sequence[TrialRow], int]:
    """First rows and their total number of the dataset of the same name, if there is one that needs no file."""
    if not limit or name not in registry.names("dataset"):
        if values and limit:
            raise ConfigError(f"There is no dataset {name!r} for {', '.join(f'data.{key}' for key in values)}.")
        return [], 0
    component = registry.find("dataset", name)
    section = section_of_values(section_of(component, Kind.DATASET), dict(values), name="data")
    return _rows_of(component.load()(section), limit)


def _rows_of(records: Any, limit: int, name: str = "", prepared: Preparation | None = None) -> tuple[list[LocatedRow], int]:
    rows = [
        LocatedRow(
            messages=_with_references(without_answer(record["messages"]), prepared),
            metadata=record.get("extra_env_info"),
            source=name,
            location=row_location(records, index),
        )
        for index in range(min(limit, len(records)))
        for record in [records[index]]
    ]
    return rows, len(records)


def _with_references(messages: list[dict[str, Any]], prepared: Preparation | None) -> list[dict[str, Any]]:
    """The messages with references to their images, as environments get them in a run."""
    if prepared is None or not image_parts(messages):
        return messages
    from rl_train.data.images import read_images

    return read_images(messages, prepared.tokenizer)[0]


def _parsed(settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the environment's and of the dataset's section."""
    environment: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r} is not a setting: write key=value.")
        target = data if key.startswith("data.") else environment
        *sections, last = key.removeprefix("data.").split(".")
        for section in sections:
            target = target.setdefault(section, {})
        try:
            target[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: the value is not YAML: {error}") from error
    return environment, data
