"""Reward shaping, the KL penalty in the reward of each token, and clipping of advantages."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.config import MAX_KL_ERROR, AdaptiveKLConfig, PolicyGradientLossConfig
from rl_train.algorithms.losses.kl import reference_kl
from rl_train.algorithms.policy_configs import PolicyGradientConfig, RewardScalingConfig
from rl_train.config.schema import LossConfig, RunConfig
from rl_train.run import Run

OVERLONG = "overlong"
"""Name of the length penalty among the components of a reward."""


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """Rewards [B] mapped linearly from the source range to the target range; those outside are clipped."""
    fraction = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / (
        config.source_max - config.source_min
    )
    return config.target_min + fraction * (config.target_max - config.target_min)


def overlong_penalty(lengths: torch.Tensor, *, limit: int, buffer: int, penalty: float) -> torch.Tensor:
    """DAPO's soft overlong penalty: 0 up to `limit - buffer` tokens, then linear to `-penalty` at the limit and beyond.

    Source: https://arxiv.org/abs/2503.14476, equation 13.

    Args:
        lengths: [B] number of sampled tokens.
        limit: maximum number of tokens of an answer.
        buffer: number of tokens before the limit at which it starts.
        penalty: penalty of an answer at the limit.
    """
    beyond = (lengths.float() - (limit - buffer)) / buffer
    return -penalty * beyond.clamp(0.0, 1.0)


class RewardShaping:
    """Scales and shapes the `rewards` of a batch by the run's config, and masks out truncated rows with `overlong_filtering`.

    Args:
        config: the algorithm's section.
        run: the whole config, for the length limit.
    """

    def __init__(self, config: PolicyGradientConfig, run: RunConfig) -> None:
        self._scaling, self._shaping, self._filters = config.reward_scaling, config.reward_shaping, config.overlong_filtering
        generation = run.policy.generation
        self._limit = self._shaping.max_response_length or (generation.max_new_tokens if generation is not None else 0)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Shape `rewards` [B], `reward_parts` and `sample_mask` in place; returns metrics, none if no reward is shaped."""
        metrics: dict[str, float] = {}
        if self._filters:
            batch["sample_mask"] = batch["sample_mask"] * ~batch["truncated"]
        rewards = batch["rewards"]
        if self._scaling.enabled:
            outside = (rewards < self._scaling.source_min) | (rewards > self._scaling.source_max)
            metrics["reward/clipped_frac"] = float(outside.float().mean())
            rewards = scale_rewards(rewards, self._scaling)
            if "baseline_rewards" in batch:
                batch["baseline_rewards"] = scale_rewards(batch["baseline_rewards"], self._scaling)
        if self._shaping.enabled:
            length_penalty = overlong_penalty(
                batch["token_mask"].sum(-1),
                limit=self._limit,
                buffer=self._shaping.overlong_buffer_length,
                penalty=self._shaping.overlong_buffer_penalty,
            )
            metrics["reward/overlong"] = float(length_penalty.mean())
            rewards = rewards + length_penalty
            batch["reward_parts"] = [
                {**parts, OVERLONG: float(amount)} for parts, amount in zip(batch["reward_parts"], length_penalty, strict=True)
            ]
        if metrics:
            scored = batch["scored"] if "scored" in batch else torch.ones_like(rewards, dtype=torch.bool)
            metrics["reward/shaped"] = float(rewards[scored].mean()) if bool(scored.any()) else 0.0
            batch["rewards"] = rewards
        return metrics


def clip_advantages(
    values: torch.Tensor, mask: torch.Tensor, config: PolicyGradientConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages [B, T] clipped to `advantage_clip_low` and `advantage_clip_high`, and the fraction of clipped tokens."""
    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is None and high is None:
        return values, {}
    clipped = values.clamp(low, high)
    clipped_frac = ((clipped != values) & (mask > 0)).sum() / (mask > 0).sum().clamp(min=1)
    return clipped, {"advantage/clipped_frac": float(clipped_frac)}


class AdaptiveKLController:
    """Adaptive weight of a KL penalty: it rises while the KL is above its target and falls while it is below.

    After a step of n answers with a mean KL to the reference policy, summed over the tokens of an answer:

        e      = clip(KL / target - 1, -0.2, 0.2)
        weight = weight (1 + e n / horizon)

    Source: https://arxiv.org/abs/1909.08593, section 2.2. There n / horizon is a constant, K_beta = 0.1; with a horizon,
    a step with twice the answers changes the weight twice as much.

    Args:
        config: the section `loss_fn.adaptive_kl`.
        weight: the initial weight.
    """

    def __init__(self, config: AdaptiveKLConfig, *, weight: float) -> None:
        self._config = config
        self._initial = self.weight = weight

    def update(self, kl: float, *, answers: int) -> None:
        """Update the weight after a step.

        Args:
            kl: mean KL per answer of the step, in nats.
            answers: n, number of answers.
        """
        error = min(max(kl / self._config.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        self.weight *= 1.0 + error * answers / self._config.horizon

    def state_dict(self) -> dict[str, Any]:
        """The current and the initial weight."""
        return {"weight": self.weight, "first": self._initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, unless the config has another initial weight: then start from that."""
        if state["first"] == self._initial:
            self.weight = state["weight"]


class KLInReward:
    """KL penalty in the reward of each token, instead of in the loss.

    Args:
        config: the section `loss_fn`.

    Attributes:
        controller: updates the weight after each step; None if it is constant.
    """

    required_keys = frozenset({"prev_logprobs", "reference_policy_logprobs"})

    def __init__(self, config: PolicyGradientLossConfig) -> None:
        self._config = config
        weight, adaptive = config.reference_policy_kl_penalty, config.adaptive_kl
        self._constant = weight
        self.controller = None if adaptive is None else AdaptiveKLController(adaptive, weight=weight)

    @property
    def weight(self) -> float:
        """The weight of the penalty in the next step; an adaptive one adapts from what is set."""
        return self._constant if self.controller is None else self.controller.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._constant = value
        if self.controller is not None:
            self.controller.weight = value

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Add `token_penalties` [B, T] to the batch; returns the mean KL per trained token and an adaptive weight."""
        mask = batch["token_mask"]
        kl = reference_kl(batch["prev_logprobs"], batch["reference_policy_logprobs"], self._config) * mask
        metrics = {"kl/reference": float(kl.sum() / mask.sum().clamp(min=1.0))}
        weight = self.weight
        if self.controller is not None:
            metrics |= {"kl/penalty_weight": weight} | self._follow(kl, batch)
        batch["token_penalties"] = weight * kl
        return metrics

    def _follow(self, kl: torch.Tensor, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Update the weight for the next step; the penalties of this step use the weight before the update."""
        assert self.controller is not None
        answers = (batch["token_mask"] > 0).any(dim=-1)
        if not answers.any():
            return {}
        per_answer = float(kl.double().sum(dim=-1)[answers].mean())
        self.controller.update(per_answer, answers=int(answers.sum()))
        return {"kl/answer": per_answer}


class NoPenalty:
    """Leaves the reward as it is."""

    required_keys: frozenset[str] = frozenset()

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Nothing."""
        return {}


def kl_in_reward(loss_fn: LossConfig) -> KLInReward | None:
    """The KL penalty in the reward of a section `loss_fn`; None if it has none."""
    if isinstance(loss_fn, PolicyGradientLossConfig) and loss_fn.use_kl_in_reward:
        return KLInReward(loss_fn)
    return None


def kl_penalty(run: Run) -> KLInReward | NoPenalty:
    """The KL penalty in the reward of a run, whose checkpoints have its adaptive weight."""
    penalty = kl_in_reward(run.config.loss_fn)
    if penalty is not None:
        run.control.use_penalty(penalty)
        if penalty.controller is not None:
            run.keep("adaptive_kl", penalty.controller)
    return penalty or NoPenalty()
