"""The section `grpo`; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config.schema import AlgorithmConfig, Section


class AdvantageConfig(Section):
    """How rewards become advantages (`grpo.adv_estimator`)."""

    normalize_rewards: bool = True
    """Divide the centred rewards of a group by their standard deviation."""
    use_leave_one_out_baseline: bool = False
    """Centre each reward on the mean of the others of its group."""


class GRPOConfig(AlgorithmConfig):
    """Group-relative policy optimisation."""

    default_loss: ClassVar[str] = "clipped_pg"
    needs_generation: ClassVar[bool] = True

    num_prompts_per_step: int = Field(default=32, ge=1)
    """P, the prompts drawn each step."""
    num_generations_per_prompt: int = Field(default=8, ge=2)
    """G, the samples drawn for each prompt."""
    max_rollout_turns: int = Field(default=1, ge=1)
    """Most turns of one rollout."""
    adv_estimator: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    overlong_filtering: bool = False
    """Leave rows that a limit cut off out of the loss; their rewards still count in their group's mean."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each validation prompt; accuracy is their mean."""
    skip_logprobs_when_on_policy: bool = True
    """Skip the scoring pass where a step makes one optimizer step: the ratio is then identically 1."""
    rollout_source: Literal["on_demand"] = "on_demand"
    """Where a step's rollouts come from: `on_demand` samples them with the newest weights when they are asked for."""
