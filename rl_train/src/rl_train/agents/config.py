"""The section of a task whose agent returns its reward. Does not import torch."""

from __future__ import annotations

from pydantic import model_validator

from rl_core.config.schema import EnvironmentConfig


class AgentEnvironmentConfig(EnvironmentConfig):
    """`env.<task>` with an `agent` and no environment: the agent returns the reward of its rollout."""

    @model_validator(mode="after")
    def _has_an_agent(self) -> AgentEnvironmentConfig:
        if self.agent is None:
            raise ValueError("environment `agent` does not score anything: set `agent` to the dotted path of a function")
        return self
