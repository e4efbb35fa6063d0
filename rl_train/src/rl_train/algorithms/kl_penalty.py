"""KL penalty to the reference policy in the reward of each token, with a constant or adaptive weight."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.config import MAX_KL_ERROR, AdaptiveKLConfig, ClippedPGLossConfig
from rl_train.algorithms.losses.policy_gradient import reference_kl
from rl_train.config.schema import LossConfig
from rl_train.rollouts.segments import rows_of_rollouts


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

    def __init__(self, config: ClippedPGLossConfig) -> None:
        self._config = config
        weight, adaptive = config.reference_policy_kl_penalty, config.adaptive_kl
        self.controller = None if adaptive is None else AdaptiveKLController(adaptive, weight=weight)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Add `token_penalties` [B, T] to the batch; returns the mean KL per trained token and an adaptive weight."""
        mask = batch["token_mask"]
        kl = reference_kl(batch["prev_logprobs"], batch["reference_policy_logprobs"], self._config) * mask
        metrics = {"kl/reference": float(kl.sum() / mask.sum().clamp(min=1.0))}
        weight = self._config.reference_policy_kl_penalty
        if self.controller is not None:
            weight = self.controller.weight
            metrics |= {"kl/penalty_weight": weight} | self._follow(kl, batch)
        batch["token_penalties"] = weight * kl
        return metrics

    def _follow(self, kl: torch.Tensor, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Update the weight for the next step; the penalties of this step use the weight before the update."""
        assert self.controller is not None
        rollouts = rows_of_rollouts(batch)
        is_answer = (batch["token_mask"] > 0).any(dim=-1)
        answers = torch.tensor([bool(is_answer[rows].any()) for rows in rollouts])
        if not answers.any():
            return {}
        sums = kl.double().sum(dim=-1)
        per_answer = float(torch.stack([sums[rows].sum() for rows in rollouts])[answers].mean())
        self.controller.update(per_answer, answers=int(answers.sum()))
        return {"kl/answer": per_answer}


def kl_in_reward(loss_fn: LossConfig) -> KLInReward | None:
    """The KL penalty in the reward of a section `loss_fn`; None if it has none."""
    if isinstance(loss_fn, ClippedPGLossConfig) and loss_fn.use_kl_in_reward:
        return KLInReward(loss_fn)
    return None
