"""Advantages of a step's tokens, and the returns that the critic is trained on.

A scalar head computes a value after it has read a token, so the value of the state in which token t is sampled is at t - 1.
Advantages are at the positions of tokens, like log-probabilities; returns are at the positions of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.advantages import whiten
from rl_train.algorithms.estimators import token_penalties
from rl_train.algorithms.gae import (
    adaptive_lambda,
    as_targets,
    at_last_trained,
    explained_variance,
    generalized_advantages,
    is_last_trained,
    state_values,
)
from rl_train.algorithms.ppo_config import GAEConfig


@dataclass(frozen=True, kw_only=True)
class GAETargets:
    """Advantages and returns of the tokens of a step."""

    advantages: torch.Tensor
    """[B, T] float32; 0.0 on tokens that are not trained."""
    returns: torch.Tensor
    """[B, T] float32, target of the value after each token; 0.0 if the next token is not trained."""
    metrics: dict[str, float]
    """Statistics of advantages and values."""


def compute_gae_targets(batch: BatchedDataDict[Any], config: GAEConfig) -> GAETargets:
    """Advantages and returns of a step's rows.

    The reward of a row is assigned to its last trained token; penalties are subtracted at each token.

    Args:
        batch: `rewards`, `prev_values`, `token_mask`, `sample_mask`, `truncated`, and `token_penalties` if the KL is in the
            reward.
        config: the section `gae`.
    """
    mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
    rewards = at_last_trained(batch["rewards"], batch["token_mask"]) - token_penalties(batch)
    values = state_values(batch["prev_values"])
    bootstrap = None
    if config.bootstrap_truncated:
        after_all = (batch["prev_values"] * is_last_trained(batch["token_mask"])).sum(-1)
        bootstrap = torch.where(batch["truncated"], after_all, 0.0)

    def advantages_at(lam: float | torch.Tensor) -> torch.Tensor:
        return generalized_advantages(rewards, values, batch["token_mask"], gamma=config.gamma, lam=lam, bootstrap=bootstrap)

    adaptive = config.length_adaptive_alpha
    advantages = advantages_at(config.lam if adaptive is None else adaptive_lambda(batch["token_mask"], adaptive))
    of_value = advantages if config.value_lam is None else advantages_at(config.value_lam)
    returns = (of_value + values) * batch["token_mask"]
    trained = advantages[mask > 0]
    metrics = {
        "value/explained_variance": explained_variance(values, returns, mask),
        "advantage/mean": float(trained.mean()) if trained.numel() else 0.0,
        "advantage/std": float(trained.std(correction=0)) if trained.numel() else 0.0,
    }
    return GAETargets(
        advantages=whiten(advantages, mask) if config.normalize_advantages else advantages,
        returns=as_targets(returns),
        metrics=metrics,
    )


def critic_rows(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The rows to train the critic on: `token_mask` is 1 at the positions of the values of trained tokens' states."""
    columns = ("input_ids", "input_lengths", "sample_mask", "returns", "prev_values")
    rows: BatchedDataDict[Any] = BatchedDataDict({key: batch[key] for key in columns})
    if "prompt_id" in batch:
        rows["prompt_id"] = batch["prompt_id"]
    rows["token_mask"] = as_targets(batch["token_mask"])
    return rows


def critic_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the critic's training call, as `value/grad_norm` and so on."""
    return {f"value/{name}": result[name] for name in ("grad_norm", "lr", "num_optimizer_steps")} | dict(result["metrics"])
