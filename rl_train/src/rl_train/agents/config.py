"""The sections of tasks whose agents return the reward. Does not import torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rl_core.config.schema import EnvironmentConfig


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
