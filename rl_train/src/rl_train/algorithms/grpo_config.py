"""The section `grpo`. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import Field, field_validator, model_validator

from rl_core.config.schema import Section
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean, is_path
from rl_train.algorithms.losses.config import ClippedPGLossConfig
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig, RewardShapingConfig
from rl_train.config.algorithm_section import TrainingPlan
from rl_train.config.runtime_needs import RuntimeNeeds
from rl_train.config.schema import RunConfig

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "gdpo", "turn_level")


class AdvantageConfig(Section):
    """How advantages are computed from rewards (`grpo.adv_estimator`)."""

    name: str = "grpo"
    """Advantage estimator. `grpo`: relative to the group; `rloo`: relative to the other samples of the group, without
    normalization; `reinforce_plus_plus`: relative to the whole batch; `gdpo`: each named reward separately, then a weighted
    sum; `turn_level`: the discounted return of each turn, relative to the group; or the dotted path of an
    `AdvantageEstimator`."""
    normalize_rewards: bool | None = None
    """Whether to divide the centered rewards of a group by their standard deviation. By default, `grpo`, `gdpo` and
    `turn_level` do and `rloo` does not."""
    use_leave_one_out_baseline: bool | None = None
    """Whether to center each reward on the mean of the other rewards of its group. By default, only `rloo`
    does."""
    minus_baseline: bool = False
    """For `reinforce_plus_plus`: whether to subtract the group's mean reward before the batch is normalized."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """For `gdpo`: weights of the named rewards, 1 by default. `overlong` is the penalty of `reward_shaping`."""
    normalize_batch: bool = True
    """For `gdpo`: whether to normalize the weighted sum over the batch."""
    turn_discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """For `turn_level`: discount factor from one turn to the next. With 1 and rewards only in the last turn, the advantages are
    those of `grpo`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an estimator given by its path."""

    @property
    def normalizes(self) -> bool:
        """Whether rewards are divided by the standard deviation of their group."""
        return self.name != "rloo" if self.normalize_rewards is None else self.normalize_rewards

    @property
    def leaves_one_out(self) -> bool:
        """Whether a reward is compared only with the other rewards of its group."""
        return self.name == "rloo" if self.use_leave_one_out_baseline is None else self.use_leave_one_out_baseline

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not is_path(name) and name not in ESTIMATORS:
            suggestion = did_you_mean(name, list(ESTIMATORS)).rstrip()
            raise ValueError(f"unknown estimator {name!r}: use {', '.join(ESTIMATORS)} or a dotted path.{suggestion}")
        return name

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> AdvantageConfig:
        of_groups = self.name in ("grpo", "rloo", "gdpo", "turn_level")
        used = {
            "normalize_rewards": of_groups or self.normalize_rewards is None,
            "use_leave_one_out_baseline": of_groups or self.use_leave_one_out_baseline is None,
            "minus_baseline": self.name == "reinforce_plus_plus" or not self.minus_baseline,
            "reward_weights": self.name == "gdpo" or not self.reward_weights,
            "normalize_batch": self.name == "gdpo" or self.normalize_batch,
            "turn_discount": self.name == "turn_level" or self.turn_discount == 1.0,
            "kwargs": is_path(self.name) or not self.kwargs,
        }
        for key, fits in used.items():
            if not fits:
                raise ValueError(f"adv_estimator {self.name!r} does not use {key}: remove it")
        if self.name == "rloo" and self.use_leave_one_out_baseline is False:
            raise ValueError(
                "rloo always uses the leave-one-out baseline: remove use_leave_one_out_baseline, or use `name: grpo`"
            )
        return self


class GRPOConfig(PolicyGradientConfig):
    """Group-relative policy optimization (GRPO)."""

    num_generations_per_prompt: int = Field(default=8, ge=2)
    """G, number of samples per prompt."""
    adv_estimator: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """How advantages are computed from rewards."""
    use_dynamic_sampling: bool = False
    """Whether to drop groups whose environment rewards are all equal, and to draw more prompts until the step has P other
    groups."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Maximum number of groups that a step may sample, as a multiple of P x `batch_multiplier`. After them, the step continues
    with the groups collected so far."""
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    """Number of groups that dynamic sampling begins for each missing one. Above 1, surplus groups are kept for later steps
    within `rollout.max_staleness`, then dropped."""

    @property
    def prompts_per_draw(self) -> int:
        """Number of prompts whose groups begin together if all groups of a step are missing."""
        return math.ceil(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        needs = super().runtime_needs
        assert needs.rollouts is not None
        rollouts = replace(needs.rollouts, accepts_segments=True, selects_groups=self.use_dynamic_sampling)
        return replace(needs, rollouts=rollouts)

    @model_validator(mode="after")
    def _check_dynamic_sampling(self) -> GRPOConfig:
        if self.batch_multiplier > 1 and not self.use_dynamic_sampling:
            raise ValueError(
                "batch_multiplier above 1 draws extra prompts, which are only used by dynamic sampling: set "
                "use_dynamic_sampling, or set batch_multiplier to 1"
            )
        of_batch = self.adv_estimator.name == "reinforce_plus_plus" and not self.adv_estimator.minus_baseline
        if self.use_dynamic_sampling and of_batch:
            raise ValueError(
                "use_dynamic_sampling drops groups with equal rewards, but adv_estimator reinforce_plus_plus compares "
                "rewards with the whole batch and learns from these groups. Set minus_baseline, or disable dynamic sampling"
            )
        return self

    @model_validator(mode="after")
    def _penalty_size_has_effect(self) -> GRPOConfig:
        default = RewardShapingConfig.model_fields["overlong_buffer_penalty"].default
        sized = self.reward_shaping.enabled and self.reward_shaping.overlong_buffer_penalty != default
        if sized and self.adv_estimator.name == "gdpo" and self.adv_estimator.normalizes:
            raise ValueError(
                f"reward_shaping.overlong_buffer_penalty is {self.reward_shaping.overlong_buffer_penalty:g}, but "
                "adv_estimator gdpo divides each named reward by its standard deviation in the group, so the size of the "
                f"penalty would have no effect. Leave it at {default:g} and set adv_estimator.reward_weights: {{overlong: "
                f"...}} instead"
            )
        return self

    @model_validator(mode="after")
    def _scaling_has_effect(self) -> GRPOConfig:
        if self.adv_estimator.name == "gdpo" and self.reward_scaling.enabled:
            raise ValueError(
                "reward_scaling scales the sum of the rewards, but adv_estimator gdpo normalizes each named reward and does "
                "not use the sum. Remove reward_scaling, and use reward_weights instead"
            )
        if self.adv_estimator.name == "turn_level" and self.reward_scaling.enabled:
            raise ValueError(
                "reward_scaling scales and clips the sum of the rewards of all turns, but adv_estimator turn_level uses the "
                "reward of each turn. Remove reward_scaling, and scale the rewards in the environment"
            )
        return self

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        # Dynamic sampling may find fewer informative groups.
        return TrainingPlan(steps=self.max_num_steps, rows=self.rows_per_step, is_exact=not self.use_dynamic_sampling)

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts(run)
        loss = run.loss_fn
        if self.max_num_epochs is not None and self.use_dynamic_sampling:
            yield (
                (run.algorithm_name, "max_num_epochs"),
                "dynamic sampling draws as many prompts per step as it needs, so an epoch is not a fixed number of steps. "
                "Set only max_num_steps.",
            )
        if isinstance(loss, ClippedPGLossConfig) and loss.use_kl_in_reward and self.adv_estimator.name == "gdpo":
            yield (
                ("loss_fn", "use_kl_in_reward"),
                "adv_estimator gdpo normalizes several rewards separately, so there is no single reward to subtract the KL "
                "penalty from. Set use_kl_in_reward to false to keep the penalty in the loss.",
            )
