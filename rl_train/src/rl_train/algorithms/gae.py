"""Generalized advantage estimation (GAE) over the trained tokens of a row; pure functions.

Source: https://arxiv.org/abs/1506.02438, equations 11, 12 and 16. With t_1 < ... < t_n the trained tokens of a row, V_k the
value of the state in which t_k is sampled, and r_k the reward of t_k:

    delta_k = r_k + gamma V_(k+1) - V_k
    A_k     = delta_k + gamma lam A_(k+1)
    R_k     = A_k + V_k, the target of the critic

Tokens between two turns are not actions and are not discounted: the next state of a token is that of the next *trained* token.
V_(n+1) is 0 if the row has ended.

Notation: B rows, T tokens.
"""

from __future__ import annotations

import torch

from rl_train.algorithms.advantages import are_equal


def state_values(values: torch.Tensor) -> torch.Tensor:
    """[B, T] the value of the state in which token t is sampled, from values [B, T] after token t.

    Position 0 has 0.0: the first token is never sampled.
    """
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def as_targets(per_token: torch.Tensor) -> torch.Tensor:
    """[B, T] values of token t moved to t - 1, where a scalar head computes them; the inverse of `state_values`."""
    return torch.nn.functional.pad(per_token[:, 1:], (0, 1))


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, T] float32 advantages, 0.0 on tokens that are not trained.

    Args:
        rewards: [B, T] reward of each trained token.
        values: [B, T] the value of the state in which each token is sampled (`state_values`).
        mask: [B, T]; above 0 for trained tokens.
        gamma: discount from a trained token to the next.
        lam: 1 uses the whole return, 0 a single step; a number, or [B] one per row.
        bootstrap: [B] value of what follows the last trained token; 0 by default, for rows that have ended.
    """
    # In float64: with gamma = lam = 1 the rounding errors of thousands of sums would add up.
    rewards, values = rewards.double(), values.double()
    next_value = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap.double()
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t] > 0
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + decay * next_advantage
        advantages[:, t] = advantage.masked_fill(~trained, 0.0)
        next_advantage = torch.where(trained, advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
    return advantages.float()


def adaptive_lambda(mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """[B] lam = 1 - 1 / (alpha n) for rows of n trained tokens, never below 0, so that long rows have a longer horizon.

    Source: https://arxiv.org/abs/2504.05118, section 4.2.
    """
    return (1.0 - 1.0 / (alpha * (mask > 0).sum(-1).clamp(min=1))).clamp(min=0.0)


def at_last_trained(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] the number [B] of each row at its last trained token, and 0.0 elsewhere."""
    return torch.where(is_last_trained(mask), numbers.unsqueeze(-1), 0.0)


def is_last_trained(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: True at the last trained token of a row, if it has one."""
    trained = mask > 0
    remaining = trained.flip(-1).cumsum(-1).flip(-1)
    return trained & (remaining == 1)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Fraction of the variance of the returns that the values explain: 1 is all, 0 is no better than a constant.

    0.0 if the returns are all equal up to rounding.

    Args:
        values: [B, T].
        returns: [B, T].
        mask: [B, T]; above 0 for trained tokens.
    """
    trained = mask > 0
    actual, error = returns.double()[trained], (returns.double() - values.double())[trained]
    if actual.numel() == 0 or bool(are_equal(actual.min(), actual.max())):
        return 0.0
    return 1.0 - float(error.var(correction=0) / actual.var(correction=0))
