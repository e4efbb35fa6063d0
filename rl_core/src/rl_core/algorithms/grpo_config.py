"""The section `grpo`; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rl_core.algorithms.losses.config import ClippedPGLossConfig
from rl_core.algorithms.losses.preference_config import PreferenceLossConfig
from rl_core.config.schema import AlgorithmConfig, RunConfig, Section
from rl_core.config.written import Path

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "gdpo")


class AdvantageConfig(Section):
    """How rewards become advantages (`grpo.adv_estimator`)."""

    name: str = "grpo"
    """`grpo`: within the group; `rloo`: against the others of the group, without normalisation; `reinforce_plus_plus`: against
    the whole batch; `gdpo`: each named reward by itself, then weighted; or the dotted path of an `AdvantageEstimator`."""
    normalize_rewards: bool | None = None
    """Divide the centred rewards of a group by their standard deviation; `grpo` and `gdpo` do, `rloo` does not by default."""
    use_leave_one_out_baseline: bool | None = None
    """Centre each reward on the mean of the others of its group; `rloo` does, `grpo` and `gdpo` do not by default."""
    minus_baseline: bool = False
    """`reinforce_plus_plus`: take the group's mean from its rewards before the batch is normalised."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """`gdpo`: weights of the named rewards; 1 by default."""
    normalize_batch: bool = True
    """`gdpo`: normalise the weighted sum over the batch."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an estimator given by its path."""

    @property
    def normalizes(self) -> bool:
        """Whether groups are divided by their standard deviation."""
        return self.name != "rloo" if self.normalize_rewards is None else self.normalize_rewards

    @property
    def leaves_one_out(self) -> bool:
        """Whether a reward is compared with the others of its group alone."""
        return self.name == "rloo" if self.use_leave_one_out_baseline is None else self.use_leave_one_out_baseline

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> AdvantageConfig:
        is_path = "." in self.name
        if not is_path and self.name not in ESTIMATORS:
            raise ValueError(f"adv_estimator {self.name!r} is unknown: use {', '.join(ESTIMATORS)} or a dotted path")
        of_groups = self.name in ("grpo", "rloo", "gdpo")
        belongs = {
            "normalize_rewards": of_groups or self.normalize_rewards is None,
            "use_leave_one_out_baseline": of_groups or self.use_leave_one_out_baseline is None,
            "minus_baseline": self.name == "reinforce_plus_plus" or not self.minus_baseline,
            "reward_weights": self.name == "gdpo" or not self.reward_weights,
            "normalize_batch": self.name == "gdpo" or self.normalize_batch,
            "kwargs": is_path or not self.kwargs,
        }
        for key, fits in belongs.items():
            if not fits:
                raise ValueError(f"adv_estimator {self.name!r} has no use for {key}: remove it")
        if self.name == "rloo" and self.use_leave_one_out_baseline is False:
            raise ValueError("rloo is the leave-one-out baseline: remove use_leave_one_out_baseline, or use `name: grpo`")
        return self


class RewardScalingConfig(Section):
    """A linear map of rewards, with what is outside held at its ends (`grpo.reward_scaling`)."""

    enabled: bool = False
    """Use it."""
    source_min: float = 0.0
    """Rewards below it count as it."""
    source_max: float = 1.0
    """Rewards above it count as it."""
    target_min: float = 0.0
    """What `source_min` becomes."""
    target_max: float = 1.0
    """What `source_max` becomes."""

    @model_validator(mode="after")
    def _a_range(self) -> RewardScalingConfig:
        if self.source_min >= self.source_max:
            raise ValueError(f"source_min {self.source_min} is not below source_max {self.source_max}")
        if self.target_min >= self.target_max:
            raise ValueError(
                f"target_min {self.target_min} is not below target_max {self.target_max}: better would become worse"
            )
        return self


class RewardShapingConfig(Section):
    """The soft punishment of answers that near the length limit (`grpo.reward_shaping`)."""

    enabled: bool = False
    """Use it."""
    overlong_buffer_length: int = Field(default=128, ge=1)
    """So many tokens before the limit the punishment begins, and grows evenly."""
    overlong_buffer_penalty: float = Field(default=1.0, gt=0.0)
    """What an answer at the limit loses."""
    max_response_length: int | None = Field(default=None, ge=1)
    """The limit, in sampled tokens of all turns; `policy.generation.max_new_tokens` by default."""


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
    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Scales and bounds rewards, before anything else is done with them."""
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Takes from the rewards of answers that near the length limit."""
    advantage_clip_low: float | None = Field(default=None, lt=0.0)
    """Advantages below it count as it."""
    advantage_clip_high: float | None = Field(default=None, gt=0.0)
    """Advantages above it count as it."""
    overlong_filtering: bool = False
    """Leave rows that a limit cut off out of the loss; their rewards still count in their group's mean."""
    use_dynamic_sampling: bool = False
    """Leave groups out that teach nothing, and draw further prompts until the step has P that do."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Most draws of a step; then it goes on with the groups that there are."""
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    """Dynamic sampling draws so many times P prompts at once."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each validation prompt; accuracy is their mean."""
    skip_logprobs_when_on_policy: bool = True
    """Skip the scoring pass where a step makes one optimizer step: the ratio is then identically 1."""
    rollout_source: Literal["on_demand"] = "on_demand"
    """Where a step's rollouts come from: `on_demand` samples them with the newest weights when they are asked for."""

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that are drawn at once."""
        return math.ceil(self.num_prompts_per_step * self.batch_multiplier)

    @model_validator(mode="after")
    def _dynamic_sampling_has_something_to_drop(self) -> GRPOConfig:
        if self.batch_multiplier > 1 and not self.use_dynamic_sampling:
            raise ValueError(
                "batch_multiplier would draw prompts and throw them away: set use_dynamic_sampling, or leave it at 1"
            )
        of_batch = self.adv_estimator.name == "reinforce_plus_plus" and not self.adv_estimator.minus_baseline
        if self.use_dynamic_sampling and of_batch:
            raise ValueError(
                "use_dynamic_sampling drops groups of equal rewards, and adv_estimator reinforce_plus_plus learns from them: "
                "it compares rewards with the whole batch. Set minus_baseline, or leave dynamic sampling off"
            )
        return self

    @model_validator(mode="after")
    def _named_rewards_have_no_common_scale(self) -> GRPOConfig:
        if self.adv_estimator.name == "gdpo" and self.reward_scaling.enabled:
            raise ValueError(
                "reward_scaling scales the sum of the rewards, and adv_estimator gdpo never looks at the sum: it normalises "
                "each named reward. Remove reward_scaling, and weigh with reward_weights"
            )
        return self

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        loss = run.loss_fn
        if self.max_num_epochs is not None and self.use_dynamic_sampling:
            yield (
                (run.algorithm_name, "max_num_epochs"),
                "dynamic sampling draws as many prompts a step as it needs, so that an epoch is no number of steps. Set "
                "max_num_steps alone.",
            )
        validates_greedily = run.policy.generation is not None and run.policy.generation.val_temperature == 0.0
        if self.val_num_generations_per_prompt > 1 and validates_greedily:
            yield (
                (run.algorithm_name, "val_num_generations_per_prompt"),
                "validation is greedy, so the samples of a prompt would all be the same. Set policy.generation.val_temperature "
                "to the temperature of training, or leave it at 1.",
            )
        if isinstance(loss, PreferenceLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{loss.name} compares pairs of answers, and grpo has rewards. Use a policy-gradient loss.",
            )
        if isinstance(loss, ClippedPGLossConfig) and loss.use_kl_in_reward and self.adv_estimator.name == "gdpo":
            yield (
                ("loss_fn", "use_kl_in_reward"),
                "adv_estimator gdpo has several rewards, each normalised by itself, and none that a penalty belongs to. Leave "
                "the penalty in the loss.",
            )
        shaping, at = self.reward_shaping, (run.algorithm_name, "reward_shaping")
        if not shaping.enabled or run.policy.generation is None:
            return
        turns = max([self.max_rollout_turns, *(section.max_rollout_turns or 1 for section in run.env.values())])
        if shaping.max_response_length is None and turns > 1:
            yield at, "max_response_length must be set where rollouts have several turns: max_new_tokens limits one turn alone."
        limit = shaping.max_response_length or run.policy.generation.max_new_tokens
        if shaping.overlong_buffer_length >= limit:
            yield (
                (*at, "overlong_buffer_length"),
                f"{shaping.overlong_buffer_length} tokens would punish answers of every length: it must be below the limit, "
                f"{limit} tokens.",
            )
