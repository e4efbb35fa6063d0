"""Sections of environments whose rewards are plain functions or returned by agents. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import EnvironmentConfig
from rl_core.plugins.component import is_path
from rl_core.plugins.import_path import missing_target
from rl_core.testing.outputs.reserved_names import reserved_reward

if TYPE_CHECKING:
    from rl_core.config.schema import RunSections


class FunctionEnvironmentConfig(EnvironmentConfig):
    """`env.<task>` with `reward_fn` or `reward_fns`: plain functions score the completions, which end after one turn."""

    reward_fn: str | None = None
    """Dotted path of a function that scores completions; its reward has the name of the function."""
    reward_fns: dict[str, str] = Field(default_factory=dict)
    """Several functions, used instead of `reward_fn`: the name of each reward, and the dotted path of its function. The reward
    of a row is their sum, weighted by `reward_weights`."""
    completion_format: Literal["auto", "text", "messages"] = "auto"
    """What functions with `completions` get as prompts and completions: texts, or lists of {role, content} messages. `auto` is
    `messages` if the prompts of the data are lists of messages."""
    correct_above: float | None = None
    """A completion counts as correct in `accuracy` if its reward is above this number. By default there is no accuracy."""

    @property
    def functions(self) -> dict[str, str]:
        """The path of each function, by the name of its reward."""
        if self.reward_fn is not None:
            return {self.reward_fn.replace(":", ".").rpartition(".")[2]: self.reward_fn}
        return self.reward_fns

    @property
    def reward_names(self) -> tuple[str, ...]:
        return tuple(self.functions)

    def key_of(self, name: str) -> KeyPath:
        """The key, within the section, of the function with that reward."""
        return ("reward_fn",) if self.reward_fn is not None else ("reward_fns", name)

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Functions that do not exist, without importing them."""
        if (problem := reserved_reward(self.functions)) is not None:
            remedy = " of the function, or set `reward_fns: {name: path}`" if self.reward_fn is not None else ""
            name = next(name for name in self.functions if reserved_reward([name]) is not None)
            yield self.key_of(name), f"{problem}{remedy}."
        for name, path in self.functions.items():
            if "/" in path or path.endswith(".py") or ".py:" in path:
                module = path.partition(":")[0].rpartition("/")[2].removesuffix(".py")
                yield (
                    self.key_of(name),
                    (
                        f"{path!r} is the path of a file: write the module and the function, such as {module}.my_function. "
                        "The module's folder must be the working directory, that of the config, or on PYTHONPATH."
                    ),
                )
            elif (problem := missing_target(path)) is not None:
                yield self.key_of(name), f"cannot import {path!r}: {problem}"

    @field_validator("reward_fn")
    @classmethod
    def _is_a_path(cls, path: str | None) -> str | None:
        if path is not None and not is_path(path):
            raise ValueError(f"{path!r} is not the dotted path of a function: write it in full, such as my_rewards.{path}")
        return path

    @field_validator("reward_fns", mode="before")
    @classmethod
    def _has_names(cls, paths: Any) -> Any:
        if isinstance(paths, list):
            named = ", ".join(f"{str(path).rpartition('.')[2]}: {path}" for path in paths)
            raise ValueError(f"must be a mapping from the name of each reward to its function, such as {{{named}}}")
        return paths

    @field_validator("reward_fns")
    @classmethod
    def _are_paths(cls, paths: dict[str, str]) -> dict[str, str]:
        for name, path in paths.items():
            if not is_path(path):
                raise ValueError(f"{path!r} of {name} is not the dotted path of a function: write my_rewards.{path}")
        return paths

    @model_validator(mode="after")
    def _has_functions(self) -> FunctionEnvironmentConfig:
        if self.reward_fn is not None and self.reward_fns:
            raise ValueError("reward_fn and reward_fns both set the functions: keep one of them")
        if self.reward_fn is None and not self.reward_fns:
            raise ValueError("set reward_fn, or reward_fns for several functions")
        return self


class AgentEnvironmentConfig(EnvironmentConfig):
    """`env.<task>` with an `agent` and no environment: the agent returns the reward of its rollout."""

    @model_validator(mode="after")
    def _has_an_agent(self) -> AgentEnvironmentConfig:
        if self.agent is None:
            raise ValueError("environment `agent` does not score anything: set `agent` to the dotted path of a function")
        return self


class InspectConfig(AgentEnvironmentConfig):
    """`env.inspect`: a task of Inspect (inspect-ai), whose solver and scorers run each rollout."""

    agent: str | None = "rl_train.agents.inspect_task:solve"
    """Import path of the agent that runs the task."""
    task: str
    """Import path of a function that returns the task, such as `my_tasks:sums`."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    target_key: str = "expected_answer"
    """Key of the row's metadata with the sample's target; empty if a row lacks it."""


class VerifiersConfig(AgentEnvironmentConfig):
    """`env.verifiers`: a taskset of verifiers, whose task runs and scores each rollout."""

    agent: str | None = "rl_train.agents.verifiers_task:solve"
    """Import path of the agent that runs the task."""
    taskset: str
    """Name of the package or module that exports the taskset. Its tasks are not loaded: each row is the data of one."""
    taskset_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset, such as `task`."""
    fields: dict[str, str] = Field(default_factory=lambda: {"answer": "expected_answer"})
    """Fields of the task's data by keys of the row's metadata; keys with the name of a field need no entry."""
    harness: dict[str, Any] | None = None
    """Harness that talks to the model, such as `{id: bash}`. By default, one response to the prompt."""
