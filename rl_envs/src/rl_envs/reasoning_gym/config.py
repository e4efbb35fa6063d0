"""Sections of the environment and the dataset `reasoning_gym`. Lightweight imports only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_core.config.schema import EnvironmentConfig
from rl_envs.config import GeneratedDatasetConfig


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """`env.reasoning_gym`: the scorer of each row's Reasoning Gym task."""

    answer_tag: str | None = "answer"
    """XML tag around the final answer, whose last occurrence is scored; null scores the whole completion."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of scoring one answer, in seconds. When it expires, the answer gets 0.0."""
    reward: Literal["score", "correct"] = "correct"
    """`correct` is 1.0 for the full score, else 0.0. `score` is the number that the task's scorer gives: many scorers give more
    than 0.3 to wrong answers, which training can exploit."""


class ReasoningGymDatasetConfig(GeneratedDatasetConfig):
    """Generated problems of a Reasoning Gym task."""

    dataset_name: str = "reasoning_gym"
    """Name of a registered dataset, or the dotted path of its class."""
    task: str = "leg_counting"
    """Name of the Reasoning Gym task, such as `countdown` or `spell_backward`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, such as its difficulty: `{min_animals: 2, max_animals: 4}`."""
    seed: int = 0
    """Random seed. Record i depends only on the task, its settings, the seed and i; use another seed for validation data."""
    system_prompt: str | None = "Think step by step. Give only the final answer between <answer> and </answer>."
    """System message; null for none."""
