"""What the sections of algorithms on rollouts have in common. Does not import torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.schema import AlgorithmConfig, RunConfig


class RolloutAlgorithmConfig(AlgorithmConfig):
    """Base of the sections of algorithms that train on P x G rollouts per step."""

    records_key: ClassVar[str | None] = "num_prompts_per_step"

    num_prompts_per_step: int = Field(default=32, ge=1)
    """P, number of prompts per step."""
    num_generations_per_prompt: int = Field(default=1, ge=1)
    """G, number of samples per prompt."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in a rollout; null means as many as the environment needs, or one without an environment."""

    @property
    def rows_per_step(self) -> int:
        """B = P x G, number of rows that a step trains on."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.rows_per_step)
