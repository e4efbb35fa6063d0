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
