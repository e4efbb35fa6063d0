"""The sections `grpo` and `ppo`, and what sections of algorithms that learn from rewards share. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import Section
from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean, is_path
from rl_train.algorithms.losses.config import (
    MAX_KL_ERROR,
    ClippedPGLossConfig,
    MseValueLossConfig,
    NLLLossConfig,
    PolicyGradientLossConfig,
)
from rl_train.algorithms.losses.preference_configs import KTOLossConfig, PreferenceLossConfig
from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig, RunConfig, TrainingPlan


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

    def takes_one_step(self, run: RunConfig) -> bool:
        """Whether a step makes one optimizer step of the policy, so that it trains the weights that it scores."""
        rows = run.policy.train_global_batch_size
        return rows is None or rows >= self.rows_per_step

    def is_on_policy(self, run: RunConfig) -> bool:
        return self.takes_one_step(run)

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.rows_per_step)


class RewardScalingConfig(Section):
    """Linear scaling of rewards, clipped to a range (`reward_scaling`)."""

    enabled: bool = False
    """Whether to scale rewards."""
    source_min: float = 0.0
    """Lower bound; smaller rewards are clipped to it."""
    source_max: float = 1.0
    """Upper bound; larger rewards are clipped to it."""
    target_min: float = 0.0
    """Value that `source_min` is mapped to."""
    target_max: float = 1.0
    """Value that `source_max` is mapped to."""

    @model_validator(mode="after")
    def _check_ranges(self) -> RewardScalingConfig:
        if self.source_min >= self.source_max:
            raise ValueError(f"source_min ({self.source_min}) must be below source_max ({self.source_max})")
        if self.target_min >= self.target_max:
            raise ValueError(
                f"target_min ({self.target_min}) must be below target_max ({self.target_max}): otherwise better rewards would "
                "become worse"
            )
        return self


class RewardShapingConfig(Section):
    """Soft penalty for answers close to the length limit (`reward_shaping`)."""

    enabled: bool = False
    """Whether to subtract a penalty from the rewards of overlong answers."""
    overlong_buffer_length: int = Field(default=128, ge=1)
    """Number of tokens before the limit at which the penalty starts. It grows linearly up to the limit."""
    overlong_buffer_penalty: float = Field(default=1.0, gt=0.0)
    """Penalty of an answer at the limit. With `adv_estimator: {name: gdpo}`, set `reward_weights.overlong` instead."""
    max_response_length: int | None = Field(default=None, ge=1)
    """Length limit in sampled tokens of all turns; defaults to `policy.generation.max_new_tokens`."""


class PolicyGradientConfig(RolloutAlgorithmConfig):
    """Base section of policy-gradient algorithms that learn from rewards."""

    default_loss: ClassVar[str] = "clipped_pg"

    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Scales and clips rewards before anything else is computed from them."""
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Penalizes answers close to the length limit."""
    advantage_clip_low: float | None = Field(default=None, lt=0.0)
    """Lower bound; smaller advantages are clipped to it."""
    advantage_clip_high: float | None = Field(default=None, gt=0.0)
    """Upper bound; larger advantages are clipped to it."""
    overlong_filtering: bool = False
    """Whether to exclude truncated rows from the loss. Their rewards still count in baselines and normalization."""
    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Number of samples per validation prompt; accuracy is their mean."""
    skip_logprobs_when_on_policy: bool = True
    """Whether to skip the scoring pass if a step makes one optimizer step, since the ratio is then always 1."""

    def is_on_policy(self, run: RunConfig) -> bool:
        return self.skip_logprobs_when_on_policy and super().is_on_policy(run)

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            rollouts=RolloutNeeds(
                prompts_per_draw=self.num_prompts_per_step,
                samples_per_prompt=self.num_generations_per_prompt,
                accepts_stale=True,
            ),
            max_turns=self.max_rollout_turns,
            val_samples_per_prompt=self.val_num_generations_per_prompt,
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        yield from self._loss_conflicts(run)
        yield from self._penalty_conflicts(run)
        yield from self._validation_conflicts(run)
        yield from self._shaping_conflicts(run)

    def _loss_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if isinstance(run.loss_fn, PreferenceLossConfig | KTOLossConfig):
            needed = "answers with a label" if isinstance(run.loss_fn, KTOLossConfig) else "pairs of answers"
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} needs {needed}, but {run.algorithm_name} trains on rewards. Use a policy-gradient loss.",
            )
        if isinstance(run.loss_fn, NLLLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} raises the probability of every sample regardless of its reward, so {run.algorithm_name} "
                "would not learn from rewards. Use a policy-gradient loss.",
            )

        to_sampler = isinstance(run.loss_fn, PolicyGradientLossConfig) and run.loss_fn.ratio_to == "sampler"
        if to_sampler and not self.skip_logprobs_when_on_policy:
            yield (
                (run.algorithm_name, "skip_logprobs_when_on_policy"),
                "with loss_fn.ratio_to: sampler, the loss does not use the log-probabilities of a scoring pass. Remove it.",
            )

    def _penalty_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        adaptive = run.loss_fn.adaptive_kl if isinstance(run.loss_fn, PolicyGradientLossConfig) else None
        if adaptive is not None and MAX_KL_ERROR * self.rows_per_step >= adaptive.horizon:
            yield (
                ("loss_fn", "adaptive_kl", "horizon"),
                f"{adaptive.horizon} answers are too few for steps of {self.rows_per_step}: a single step with a KL below the "
                f"target would reduce the weight by {MAX_KL_ERROR * self.rows_per_step / adaptive.horizon:.0%}, to no penalty "
                "at all. Set it to several times the number of answers per step; 10000 is usual.",
            )

    def _validation_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        validates_greedily = run.policy.generation is not None and run.policy.generation.val_temperature == 0.0
        if self.val_num_generations_per_prompt > 1 and validates_greedily:
            yield (
                (run.algorithm_name, "val_num_generations_per_prompt"),
                "validation is greedy, so all samples of a prompt would be identical. Set policy.generation.val_temperature "
                "to the training temperature, or set val_num_generations_per_prompt to 1.",
            )

    def _shaping_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        shaping, at = self.reward_shaping, (run.algorithm_name, "reward_shaping")
        if not shaping.enabled or run.policy.generation is None:
            return
        turns = max(run.max_turns.values(), default=1)
        if shaping.max_response_length is None and turns > 1:
            yield (
                at,
                ("max_response_length is required if rollouts have several turns, since max_new_tokens limits only one turn."),
            )
        limit = shaping.max_response_length or run.policy.generation.max_new_tokens
        if shaping.overlong_buffer_length >= limit:
            yield (
                (*at, "overlong_buffer_length"),
                f"{shaping.overlong_buffer_length} tokens would penalize answers of every length: it must be below the limit, "
                f"{limit} tokens.",
            )


ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "gdpo", "turn_level", "max_rl", "optimal_token_baseline", "remax")


class AdvantageConfig(Section):
    """How advantages are computed from rewards (`grpo.adv_estimator`)."""

    name: str = "grpo"
    """Advantage estimator. `grpo`: relative to the group; `rloo`: relative to the other samples of the group, without
    normalization; `reinforce_plus_plus`: relative to the whole batch; `gdpo`: each named reward separately, then a weighted
    sum; `turn_level`: the discounted return of each turn, relative to the group; `max_rl`: relative to the group, divided by
    its mean reward; `optimal_token_baseline`: relative to the group at each token; `remax`: relative to a greedy answer, which
    is sampled and scored for each prompt in addition; or the dotted path of an `AdvantageEstimator`."""
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


_WITHOUT_SHAPING = {
    "max_rl": "makes rewards negative, but adv_estimator max_rl divides by the mean reward of a group",
    "remax": "penalizes long answers, but adv_estimator remax compares rewards with that of a greedy answer, which is not "
    "penalized",
}
"""Why estimators do not work with `reward_shaping`."""


class GRPOConfig(PolicyGradientConfig):
    """Group-relative policy optimization (GRPO)."""

    num_generations_per_prompt: int = Field(default=8, ge=1)
    """G, number of samples per prompt; at least 2, or 1 with `adv_estimator: {name: remax}`."""
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
        return replace(needs, rollouts=replace(rollouts, greedy_baseline=self.adv_estimator.name == "remax"))

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
    def _penalties_suit_the_estimator(self) -> GRPOConfig:
        reason = _WITHOUT_SHAPING.get(self.adv_estimator.name)
        if self.reward_shaping.enabled and reason is not None:
            raise ValueError(f"reward_shaping {reason}. Remove reward_shaping, or use another estimator")
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
        if self.num_generations_per_prompt == 1 and self.adv_estimator.name != "remax":
            yield (
                (run.algorithm_name, "num_generations_per_prompt"),
                "1 sample per prompt is only supported with adv_estimator remax, which compares it with a greedy answer. "
                "Set at least 2, or use that estimator.",
            )
        if self.max_num_epochs is not None and self.use_dynamic_sampling:
            yield (
                (run.algorithm_name, "max_num_epochs"),
                "dynamic sampling draws as many prompts per step as it needs, so an epoch is not a fixed number of steps. "
                "Set only max_num_steps.",
            )
        if isinstance(loss, PolicyGradientLossConfig) and loss.use_kl_in_reward and self.adv_estimator.name == "gdpo":
            yield (
                ("loss_fn", "use_kl_in_reward"),
                "adv_estimator gdpo normalizes several rewards separately, so there is no single reward to subtract the KL "
                "penalty from. Set use_kl_in_reward to false to keep the penalty in the loss.",
            )
        if isinstance(loss, PolicyGradientLossConfig) and loss.use_kl_in_reward and self.adv_estimator.name == "max_rl":
            yield (
                ("loss_fn", "use_kl_in_reward"),
                "adv_estimator max_rl divides by the mean reward of a group, which a KL penalty would make negative. Set "
                "use_kl_in_reward to false to keep the penalty in the loss.",
            )


VALUE_LOSS = "mse_value"


class GAEConfig(Section):
    """How advantages and returns are computed from rewards and values (`ppo.gae`)."""

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount factor from one sampled token to the next."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's lambda for advantages, which trades bias for variance: 1 uses the whole return (no bias), 0 a single token (lowest
    variance)."""
    value_lam: float | None = Field(default=None, ge=0.0, le=1.0)
    """GAE's lambda for the returns that the critic is trained on; defaults to the lambda of the advantages."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0.0)
    """Replaces `lam` with 1 - 1 / (alpha n) for an answer of n tokens (0.05 in VAPO)."""
    normalize_advantages: bool = True
    """Whether to normalize the advantages of a step's trained tokens to mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """Whether to bootstrap the return of a truncated answer from its last value. By default, the length limit is part of the
    task, and a truncated answer has no further reward."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GAEConfig:
        if self.length_adaptive_alpha is not None and self.lam != GAEConfig.model_fields["lam"].default:
            raise ValueError("lam and length_adaptive_alpha both set the lambda of the advantages: remove one of them")
        return self


class PPOConfig(PolicyGradientConfig):
    """Proximal policy optimization (PPO) with a critic."""

    num_generations_per_prompt: int = Field(default=1, ge=1)
    """G, number of samples per prompt. One is enough, since the critic is the baseline."""
    ppo_epochs: int = Field(default=4, ge=1)
    """Number of passes of policy and critic over the rollouts of a step, each in optimizer steps of `train_global_batch_size`
    rows."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start that train only the critic, so that the policy is not trained with an untrained critic."""
    gae: GAEConfig = Field(default_factory=GAEConfig)
    """How advantages and returns are computed from rewards and values."""
    value_loss: MseValueLossConfig = Field(default_factory=MseValueLossConfig)
    """Loss of the critic. The loss of the policy is `loss_fn`."""

    @model_validator(mode="after")
    def _fixed_value_loss(self) -> PPOConfig:
        if self.value_loss.name not in (None, VALUE_LOSS):
            raise ValueError(
                f"value_loss.name is {self.value_loss.name!r}, but the loss of the critic is always {VALUE_LOSS}: remove the "
                "name"
            )
        return self

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return replace(super().runtime_needs, companions=("value",))

    def takes_one_step(self, run: RunConfig) -> bool:
        return self.ppo_epochs == 1 and super().takes_one_step(run)

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        critic_only = self.critic_warmup_steps if model == "policy" else 0
        return TrainingPlan(steps=max(0, self.max_num_steps - critic_only), rows=self.rows_per_step, passes=self.ppo_epochs)

    def check_warmup(self, steps: int) -> None:
        """Rejects a run of this many steps if it ends before the policy is trained; `max_num_epochs` may make it that short.

        Raises:
            ConfigError: The run is not longer than `critic_warmup_steps`.
        """
        if problem := self._warmup_problem(steps):
            raise ConfigError(f"ppo.critic_warmup_steps: {problem}")

    def _warmup_problem(self, steps: int) -> str | None:
        if self.critic_warmup_steps < steps:
            return None
        return (
            f"the first {self.critic_warmup_steps} steps train only the critic and the run has {steps}, so the policy would "
            "never be trained: lower it, or train longer (max_num_steps, max_num_epochs)."
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        yield from super().conflicts(run)
        if problem := self._warmup_problem(self.max_num_steps):
            yield (run.algorithm_name, "critic_warmup_steps"), problem
        if isinstance(run.loss_fn, ClippedPGLossConfig) and run.loss_fn.disable_ppo_ratio and not self.takes_one_step(run):
            yield (
                ("loss_fn", "disable_ppo_ratio"),
                "without a ratio, a step must make a single optimizer step, since further ones would train on samples of an "
                "older policy. Set ppo.ppo_epochs to 1 and remove policy.train_global_batch_size, or keep the ratio.",
            )
