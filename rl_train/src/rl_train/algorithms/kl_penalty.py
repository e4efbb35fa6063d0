"""The KL to the reference policy as a cost of each token, with a weight that is constant or follows the KL; knows no model."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.config.schema import LossConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.kl import reference_kl
from rl_train.algorithms.losses.config import MOST_ERROR, AdaptiveKLConfig, ClippedPGLossConfig


class AdaptiveKLController:
    """The weight of a KL penalty, which rises while the KL is above its target and falls while it is below.

    After a step of n answers whose KL to the reference policy is KL in the mean, each summed over its tokens:

        e      = clip(KL / target - 1, -0.2, 0.2)
        weight = weight (1 + e n / horizon)

    Source: https://arxiv.org/abs/1909.08593, section 2.2. There n / horizon is one constant, K_beta = 0.1; with a horizon a
    step of twice the answers moves the weight twice as far.

    Args:
        config: the section `loss_fn.adaptive_kl`.
        weight: the first one.
    """

    def __init__(self, config: AdaptiveKLConfig, *, weight: float) -> None:
        self._config = config
        self._first = self.weight = weight

    def update(self, kl: float, *, answers: int) -> None:
        """Move the weight after a step.

        Args:
            kl: of an answer, in the mean over the step's; in nats.
            answers: n.
        """
        error = min(max(kl / self._config.target - 1.0, -MOST_ERROR), MOST_ERROR)
        self.weight *= 1.0 + error * answers / self._config.horizon

    def state_dict(self) -> dict[str, Any]:
        """The current weight, and the first one."""
        return {"weight": self.weight, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; if the config has another first weight by now, start from that."""
        if state["first"] == self._first:
            self.weight = state["weight"]


class KLInReward:
    """The KL to the reference policy as a cost of each token, in place of a term of the loss.

    Args:
        config: the section `loss_fn`.

    Attributes:
        controller: moves the weight after each step; None where it is constant.
    """

    required_keys = frozenset({"prev_logprobs", "reference_policy_logprobs"})

    def __init__(self, config: ClippedPGLossConfig) -> None:
        self._config = config
        weight, adaptive = config.reference_policy_kl_penalty, config.adaptive_kl
        self.controller = None if adaptive is None else AdaptiveKLController(adaptive, weight=weight)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Write `token_penalties` [B, T] into the batch; returns the KL of a trained token and, if it moves, the weight."""
        mask = batch["token_mask"]
        kl = reference_kl(batch["prev_logprobs"], batch["reference_policy_logprobs"], self._config) * mask
        metrics = {"kl/reference": float(kl.sum() / mask.sum().clamp(min=1.0))}
        weight = self._config.reference_policy_kl_penalty
        if self.controller is not None:
            weight = self.controller.weight
            metrics |= {"kl/penalty_weight": weight} | self._follow(kl, mask)
        batch["token_penalties"] = weight * kl
        return metrics

    def _follow(self, kl: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        """Move the weight for the next step: this one's penalties are made with the weight that it was sampled under."""
        assert self.controller is not None
        answers = (mask > 0).any(dim=-1)
        if not answers.any():
            return {}
        of_an_answer = float(kl.double().sum(dim=-1)[answers].mean())
        self.controller.update(of_an_answer, answers=int(answers.sum()))
        return {"kl/answer": of_an_answer}


def kl_in_reward(loss_fn: LossConfig) -> KLInReward | None:
    """The cost that a section `loss_fn` asks for, if it does."""
    if isinstance(loss_fn, ClippedPGLossConfig) and loss_fn.use_kl_in_reward:
        return KLInReward(loss_fn)
    return None
