"""Turn-level advantages: each turn is compared by what its rollout still earns, with those of the group.

With r_ik the reward of turn k of rollout i, K_i its number of turns, and gamma the discount from a turn to the next:

    R_ik = sum over l = k..K_i of gamma^(l - k) r_il            return of turn k
    A_ik = (R_ik - mean_j R_jk) / std_j R_jk                    advantage of all tokens of turn k

The mean and the standard deviation are those of the group. The idea, normalized discounted returns of turns as advantages, is
that of GTPO (https://arxiv.org/abs/2511.14846), without its reward shaping. Choices made here: the statistics are taken at each
turn k, and a rollout that ended before turn k is compared by the return of its last turn, so that every turn has a comparison.
With gamma = 1 and a
reward only in the last turn, R_ik is the reward of the rollout in every turn, and the advantages are those of GRPO, also if
rollouts have different numbers of turns.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict


def turn_counts(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B] int64 number of turns of each rollout, at least 1."""
    last: torch.Tensor = batch["token_turns"].amax(-1)
    return last.clamp(min=1)


def turn_rewards(batch: BatchedDataDict[Any], token_penalties: torch.Tensor) -> torch.Tensor:
    """[B, K] float64 reward of each turn after shaping and penalties; 0 after the last turn.

    What shaping added to the reward of a rollout belongs to its last turn.

    Args:
        batch: `token_turns`, `turn_rewards` and `rewards`.
        token_penalties: [B, T] penalty of each token, which belongs to its turn.
    """
    counts = turn_counts(batch)
    rewards = torch.zeros(batch.size, int(counts.max()), dtype=torch.float64)
    for row, row_rewards in enumerate(batch["turn_rewards"]):
        last = int(counts[row]) - 1
        for turn, reward in enumerate(row_rewards):
            rewards[row, min(turn, last)] += reward
        rewards[row, last] += float(batch["rewards"][row]) - sum(row_rewards)
    turns = batch["token_turns"]
    rewards.scatter_add_(1, (turns - 1).clamp(min=0), -(token_penalties * (turns > 0)).double())
    return rewards


def turn_returns(rewards: torch.Tensor, counts: torch.Tensor, *, discount: float) -> torch.Tensor:
    """[B, K] float64 discounted sum of the rewards from each turn on; after the last turn, the return of the last turn.

    Args:
        rewards: [B, K] float64, 0 after the last turn.
        counts: [B] number of turns of each rollout, at least 1.
        discount: gamma.
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + discount * following
        returns[:, turn] = following
    turn_numbers = torch.arange(rewards.shape[1]).expand_as(rewards)
    return returns.gather(1, torch.minimum(turn_numbers, counts.unsqueeze(1) - 1))
