"""An environment and rows for it, without a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, DataError, WrongKindError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.plugins.component import Component
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs

_PROMPTS = ("messages", "prompt", "question", "problem")
_NOT_METADATA = (*_PROMPTS, "task_name", "tools", "stop_strings")


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A prompt and its metadata."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation up to the first answer."""
    metadata: Any
    """What the environment gets as the metadata of the first turn."""
    source: str = ""
    """Name of its dataset, if there are several."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentTrial:
    """An environment that can be created, and rows for it."""

    task: str
    """Task name, for messages."""
    section: EnvironmentConfig
    make: Callable[[], EnvironmentInterface]
    """Creates an instance."""
    rows: Sequence[TrialRow]
    """At least one row."""
    max_turns: int
    """Maximum number of turns of a rollout."""
    answers: Sequence[str] = ()
    """Texts that a rollout of each row is also answered with, one after the other, until it ends."""
    reads_tool_calls: bool = False
    """Whether messages of the model are parsed for tool calls, which needs the tokens of a model."""

    def reward_of(self, rewards: Mapping[str, float]) -> float:
        """The reward of a row: the weighted sum of its named rewards."""
        return sum(self.section.reward_weights.get(name, 1.0) * value for name, value in rewards.items())


def trial_row(
    row: Mapping[str, Any], what: str, *, read: Callable[[Any, str], Sequence[Mapping[str, Any]]] | None = None
) -> TrialRow:
    """A row with `messages`, or a text as `prompt`, `question` or `problem`; answers at the end are left out.

    Args:
        row: the fields; `extra_env_info` is the metadata, or else all other fields.
        what: names the row in the error.
        read: returns the messages of a prompt; its second argument names the key. By default they are not checked.

    Raises:
        DataError: it has no prompt.
    """
    key = next((key for key in _PROMPTS if row.get(key) is not None), None)
    if key is None:
        raise DataError(f"{what} has {sorted(row)}, but none of {', '.join(_PROMPTS)}; --config FILE maps the fields.")
    prompt = row[key] if key == "messages" or read is not None else [{"role": "user", "content": row[key]}]
    messages = list(prompt if read is None else read(prompt, repr(key)))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    metadata = row.get("extra_env_info", {name: value for name, value in row.items() if name not in _NOT_METADATA})
    return TrialRow(messages=messages, metadata=metadata)


def constructor(section: EnvironmentConfig, task: str, registry: Registry) -> partial[EnvironmentInterface]:
    """Creates instances of a task's environment in this process.

    Raises:
        UserError: there is no such environment, or it lacks a requirement.
    """
    name = section.env_cls or section.name or task
    worker_class = environment_component(name, registry).load()
    if not issubclass(plain_class(worker_class), EnvironmentInterface):
        raise WrongKindError(f"{name} is not a subclass of rl_core.interfaces.EnvironmentInterface.")
    return partial(plain_class(worker_class), **first_argument(worker_class, constructor_config(section)))


def parses_tool_calls(make: partial[EnvironmentInterface]) -> bool:
    """Whether the messages of a model are parsed for tool calls, for an environment that `constructor` returned."""
    plain: Any = make.func
    return bool(plain.reads_tool_calls or plain.offered_tools(*make.args, *make.keywords.values()))


def environment_component(name: str, registry: Registry) -> Component:
    """A registered environment, or the class of a path.

    Raises:
        UserError: there is no such environment, or it lacks a requirement.
    """
    component = registry.find("environment", name)
    problem = unmet_needs(component.needs)
    if problem is not None:
        raise ConfigError(f"The environment {name!r} cannot run here: {problem}. {component.install or ''}".rstrip())
    return component


def constructor_config(section: EnvironmentConfig) -> Any:
    """What an environment is created with: its section, or, for a class named by its path, a dict of the section's keys."""
    return section if section.env_cls is None else section.model_dump(exclude={"env_cls"})


def first_argument(worker_class: Any, config: Any) -> Mapping[str, Any]:
    """The config as a keyword argument for the first parameter of the class; empty if it has no parameters."""
    parameters = [p for p in inspect.signature(plain_class(worker_class)).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return {parameters[0].name: config} if parameters else {}
