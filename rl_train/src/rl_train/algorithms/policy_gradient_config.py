"""Base sections of the algorithms that learn from rewards of rollouts. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, model_validator

from rl_core.config.schema import Section
from rl_core.config.source_tree import KeyPath
from rl_train.algorithms.losses.config import MAX_KL_ERROR, ClippedPGLossConfig, NLLLossConfig
from rl_train.algorithms.losses.preference_config import PreferenceLossConfig
from rl_train.algorithms.rollout_algorithm_config import RolloutAlgorithmConfig
from rl_train.config.runtime_needs import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import RunConfig


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
        if isinstance(run.loss_fn, PreferenceLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} needs pairs of answers, but {run.algorithm_name} trains on rewards. Use a "
                "policy-gradient loss.",
            )
        if isinstance(run.loss_fn, NLLLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} raises the probability of every sample regardless of its reward, so {run.algorithm_name} "
                "would not learn from rewards. Use a policy-gradient loss.",
            )

        to_sampler = isinstance(run.loss_fn, ClippedPGLossConfig) and run.loss_fn.ratio_to == "sampler"
        if to_sampler and not self.skip_logprobs_when_on_policy:
            yield (
                (run.algorithm_name, "skip_logprobs_when_on_policy"),
                "with loss_fn.ratio_to: sampler, the loss does not use the log-probabilities of a scoring pass. Remove it.",
            )

    def _penalty_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        adaptive = run.loss_fn.adaptive_kl if isinstance(run.loss_fn, ClippedPGLossConfig) else None
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
