"""Advantage estimators, chosen by `grpo.adv_estimator`: from the rewards of a batch to the advantage of each trained token.

A row has one reward, `rewards` [B]. If the KL to the reference policy is part of the reward, each token also has a penalty,
`token_penalties` [B, T]. Estimators that compare rows subtract the sum of a row's penalties from its reward; an estimator per
token subtracts the sum from that token on.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import UserError
from rl_core.plugins.component import Component
from rl_train.algorithms.grpo import group_relative
from rl_train.algorithms.policy_configs import AdvantageConfig
from rl_train.rollouts.advantages import AdvantageEstimator, Advantages, are_equal, per_group
from rl_train.rollouts.trajectory import join_segments, split_segments

__all__ = [
    "AdvantageEstimator",
    "Advantages",
    "DecoupledEstimator",
    "GroupAdvantages",
    "GroupEstimator",
    "MaximumLikelihoodEstimator",
    "OptimalTokenBaselineEstimator",
    "PerRollout",
    "ReMaxEstimator",
    "ReinforcePlusPlusEstimator",
    "TurnLevelEstimator",
    "are_equal",
    "group_advantages",
    "group_metrics",
    "make_estimator",
    "row_penalties",
    "suffix_sums",
    "token_penalties",
    "turn_counts",
    "turn_returns",
    "turn_rewards",
    "whiten",
]

_log = logging.getLogger("rlcore")


class GroupEstimator(AdvantageEstimator):
    """Compares rewards within the group: GRPO, and RLOO with other settings.

    Args:
        normalize: divide by the group's standard deviation.
        leave_one_out: center on the mean of the others.
    """

    def __init__(self, *, normalize: bool, leave_one_out: bool) -> None:
        self.normalize, self.leave_one_out = normalize, leave_one_out

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        rewards = batch["rewards"] - row_penalties(batch)
        advantages_R = group_relative(
            rewards,
            batch["group_ids"],
            normalize=self.normalize,
            leave_one_out=self.leave_one_out,
            scored_R=batch.get("scored"),
        )
        return Advantages(values=advantages_R.unsqueeze(-1) * batch["token_mask"], metrics=group_metrics(batch))


class TurnLevelEstimator(AdvantageEstimator):
    """Compares what a rollout still earns from each turn on with the others of its group.

    With r_ik the reward of turn k of rollout i, K_i its number of turns, and gamma the discount from a turn to the next:

        R_ik = sum over l = k..K_i of gamma^(l - k) r_il            return of turn k
        A_ik = (R_ik - mean_j R_jk) / std_j R_jk                    advantage of all tokens of turn k

    The idea, normalized discounted returns of turns as advantages, is that of GTPO (https://arxiv.org/abs/2511.14846), without
    its reward shaping. Choices made here: the statistics are taken at each turn k, and a rollout that ended before turn k is
    compared by the return of its last turn, so that every turn has a comparison. With gamma = 1 and a reward only in the last
    turn, R_ik is the reward of the rollout in every turn, and the advantages are those of GRPO, also if rollouts have
    different numbers of turns.

    Args:
        discount: discount factor from one turn to the next.
        normalize: divide by the standard deviation.
        leave_one_out: center on the mean of the others.
    """

    def __init__(self, *, discount: float, normalize: bool, leave_one_out: bool) -> None:
        self.discount, self.normalize, self.leave_one_out = discount, normalize, leave_one_out

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        settings: dict[str, Any] = {"normalize": self.normalize, "leave_one_out": self.leave_one_out}
        turns_of_R = [group_relative(returns, **groups, **settings) for returns, groups in self._turns(batch)]
        by_turn = torch.stack(turns_of_R, dim=1)
        turns = batch["token_turns"]
        values = by_turn.gather(1, (turns - 1).clamp(min=0)) * (turns > 0)
        return Advantages(values=values * batch["token_mask"], metrics=group_metrics(batch))

    def is_informative(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """False for rows of groups in which the returns of every turn are equal."""
        return ~torch.stack([per_group(returns, **groups).equal_R for returns, groups in self._turns(batch)]).all(dim=0)

    def _turns(self, batch: BatchedDataDict[Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The returns of each turn, and the groups in which they are compared."""
        rewards = turn_rewards(batch, token_penalties(batch))
        # The last turn has the rounding of the rollout's float32 reward.
        groups = {"groups_R": batch["group_ids"], "scored_R": batch.get("scored"), "sizes_R": rewards.abs().sum(1)}
        for returns in turn_returns(rewards, turn_counts(batch), discount=self.discount).unbind(1):
            yield returns, groups


class ReinforcePlusPlusEstimator(AdvantageEstimator):
    """Compares rewards with the whole batch: REINFORCE++, https://arxiv.org/abs/2501.03262.

    A token's advantage is the row's reward minus the penalties from that token on, normalized over all trained tokens.

    Args:
        minus_baseline: first subtract the mean reward of each group (REINFORCE++-baseline).
    """

    def __init__(self, *, minus_baseline: bool) -> None:
        self.minus_baseline = minus_baseline

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        rewards = batch["rewards"]
        if self.minus_baseline:
            rewards = group_relative(rewards, batch["group_ids"], normalize=False, scored_R=batch.get("scored"))
        penalties = token_penalties(batch)
        values = rewards.unsqueeze(-1) - suffix_sums(penalties)
        mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
        return Advantages(values=whiten(values, mask), metrics=group_metrics(batch))


class MaximumLikelihoodEstimator(AdvantageEstimator):
    """Divides by the mean reward of the group instead of its standard deviation: MaxRL, https://arxiv.org/abs/2602.02710.

    (r - mean) / mean, and 0 in groups without success. With rewards of 0 and 1, groups of n rollouts and the probability p of
    success, the expected gradient is that of log p, expanded in powers of 1 - p up to the power n - 1; that of REINFORCE is the
    first term. The only success of a group has the advantage n - 1.

    Raises:
        UserError: a reward is negative, so their mean cannot be a probability of success.
    """

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        rewards, scored = batch["rewards"], batch.get("scored")
        counted = rewards if scored is None else rewards[scored]
        if bool((counted < 0).any()):
            raise UserError(
                f"grpo.adv_estimator max_rl divides by the mean reward of a group, so rewards must not be negative: found "
                f"{float(counted.min()):g}. Return rewards of at least 0, set grpo.reward_scaling, or use another estimator."
            )
        means = per_group(rewards, batch["group_ids"], scored_R=scored).mean_R
        centered = group_relative(rewards, batch["group_ids"], normalize=False, scored_R=scored)
        advantages = torch.where(centered == 0, 0.0, centered / means.clamp(min=torch.finfo(torch.float64).tiny)).float()
        return Advantages(values=advantages.unsqueeze(-1) * batch["token_mask"], metrics=group_metrics(batch))


class OptimalTokenBaselineEstimator(AdvantageEstimator):
    """Subtracts the baseline that minimizes the variance of the gradient at each token: https://arxiv.org/abs/2602.07078.

    With G_ik the reward of rollout i less its penalties from its k-th trained token on, and p_ij the probability of its j-th
    token before the step:

        W_ik = sum over j = 1..k of (1 - p_ij)²                   energy of the gradient up to token k
        A_ik = G_ik - (sum over i of W_ik G_ik) / (sum over i of W_ik)

    The sums are over the rollouts of a group that have a k-th token; the baseline is 0 for the tokens that only one has. The
    paper's energy of a token, 1 - 2p + q with q the sum of the squared probabilities of the vocabulary, needs the whole
    distribution. It is between (1 - p)² and 2 (1 - p)², because the other probabilities add up to 1 - p; a common factor
    cancels. Departure: rollouts of groups with equal rewards have advantage 0, as in GRPO.
    """

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        logprobs = batch["prev_logprobs"] if "prev_logprobs" in batch else batch["generation_logprobs"]
        scored = batch["scored"] if "scored" in batch else torch.ones_like(batch["rewards"], dtype=torch.bool)
        trained = batch["token_mask"] > 0
        energy = torch.where(trained, torch.expm1(logprobs.double()).square(), 0.0).cumsum(-1) + _LEAST_ENERGY
        returns = batch["rewards"].double().unsqueeze(-1) - suffix_sums(token_penalties(batch).double())

        _, groups = torch.unique(batch["group_ids"], return_inverse=True)
        width = trained.shape[1]
        slots = groups.unsqueeze(-1) * width + (trained.cumsum(-1) - 1).clamp(min=0)  # of a group and a token number
        counted = (trained & scored.unsqueeze(-1)).double()

        def over_rollouts(values: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros(width * batch.size, dtype=torch.float64)
            return sums.index_add(0, slots.flatten(), (values * counted).flatten())[slots]

        baseline = over_rollouts(energy * returns) / over_rollouts(energy).clamp(min=_LEAST_ENERGY)
        values = returns - torch.where(over_rollouts(counted) > 1, baseline, 0.0)
        equal = per_group(batch["rewards"] - row_penalties(batch), batch["group_ids"], scored_R=scored).equal_R
        values = torch.where((counted > 0) & ~equal.unsqueeze(-1), values, 0.0)
        return Advantages(values=values.float(), metrics=group_metrics(batch))


_LEAST_ENERGY = 1e-12
"""Added to each energy, so that tokens of probability 1 have the mean as their baseline."""


class ReMaxEstimator(AdvantageEstimator):
    """Subtracts the reward of a greedy rollout of the prompt: ReMax, https://arxiv.org/abs/2310.10505, algorithm 1.

    With r_i the reward of rollout i, b the reward of the greedy rollout of its prompt, and k_t the penalty of token t:

        A_it = r_i - sum over s >= t of k_is - b

    The baseline does not depend on the sampled tokens, so the gradient is unbiased for any number of samples per prompt, also
    one. The greedy rollout has no penalties.

    Raises:
        UserError: the rollouts have no baseline, because they were recorded without one.
    """

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        returns = batch["rewards"].unsqueeze(-1) - suffix_sums(token_penalties(batch))
        values = (returns - self._baselines(batch).unsqueeze(-1)) * batch["token_mask"]
        if "scored" in batch:
            values = values * batch["scored"].unsqueeze(-1)
        metrics = group_metrics(batch) | {  # all groups have the same number of rows
            "advantage/equal_group_frac": float((~self.is_informative(batch)).double().mean()),
            "advantage/baseline": float(self._baselines(batch).mean()),
        }
        return Advantages(values=values, metrics=metrics)

    def is_informative(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """False for rows of groups whose rewards all equal that of the greedy rollout."""
        rewards, baselines = batch["rewards"], self._baselines(batch)
        differs = ~are_equal(torch.minimum(rewards, baselines), torch.maximum(rewards, baselines))
        return per_group(differs.float(), batch["group_ids"], scored_R=batch.get("scored")).mean_R > 0

    def _baselines(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        if "baseline_rewards" not in batch:
            raise UserError(
                "grpo.adv_estimator remax compares rewards with that of a greedy rollout of each prompt, which these rollouts "
                "do not have. Replay a run with adv_estimator remax, or use another estimator."
            )
        baselines: torch.Tensor = batch["baseline_rewards"]
        return baselines


class DecoupledEstimator(AdvantageEstimator):
    """Compares several named rewards separately within the group: GDPO, https://arxiv.org/abs/2601.05242.

    Normalizing the sum, as GRPO does, gives different combinations of rewards the same advantage; normalizing first keeps
    them apart. The weighted sum of the advantages is then normalized over the trained rows of the batch, with the unbiased
    standard deviation (n - 1), as in a group; the paper does not specify it, and TRL uses the unbiased one.

    Weights of the environments (`env.<task>.reward_weights`) apply as well. A reward that a row does not have counts as 0.0.
    A reward that no row of a step has contributes nothing to the step.

    Args:
        weights: weights of the rewards by name; 1 by default.
        leave_one_out: center on the mean of the others.
        normalize: divide each by the group's standard deviation.
        normalize_batch: normalize the sum over all trained rows.
    """

    def __init__(self, *, weights: dict[str, float], normalize: bool, leave_one_out: bool, normalize_batch: bool) -> None:
        self.weights, self.normalize, self.leave_one_out = weights, normalize, leave_one_out
        self.normalize_batch = normalize_batch
        self._never_seen, self._has_warned = set(weights), False

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        total, parts = torch.zeros(batch.size), self._parts(batch)
        self._warn_about_missing(parts)
        for name, rewards in parts.items():
            advantages_R = group_relative(
                rewards,
                batch["group_ids"],
                normalize=self.normalize,
                leave_one_out=self.leave_one_out,
                scored_R=batch.get("scored"),
            )
            total += self._weights(name, batch) * advantages_R
        if self.normalize_batch:
            trained = batch["sample_mask"] * (batch["token_mask"].sum(-1) > 0)
            total = whiten(total, trained, unbiased=True)
        return Advantages(values=total.unsqueeze(-1) * batch["token_mask"], metrics=group_metrics(batch))

    def is_informative(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        differs = torch.zeros(batch.size, dtype=torch.bool)
        for name, rewards in self._parts(batch).items():
            equal_R = per_group(rewards, batch["group_ids"], scored_R=batch.get("scored")).equal_R
            differs |= ~equal_R & (self._weights(name, batch) != 0)
        return differs

    def _weights(self, name: str, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """[B] weight of a reward: that of the estimator times that of the row's environment, each 1 if it is not set."""
        of_rows = [row.get(name, 1.0) for row in batch.get("reward_weights", [{}] * batch.size)]
        return self.weights.get(name, 1.0) * torch.tensor(of_rows)

    def _parts(self, batch: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        rows: list[dict[str, float]] = batch["reward_parts"]
        names = sorted({name for row in rows for name in row})
        return {name: torch.tensor([row.get(name, 0.0) for row in rows]) for name in names}

    def _warn_about_missing(self, names: Collection[str]) -> None:
        """Warn once of weights whose rewards have not been seen: rare rewards are fine, misspelt names are not."""
        missing = sorted(self._never_seen - set(names))
        if missing and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "grpo.adv_estimator.reward_weights names %s, but no rollout of this step has such a reward; the environments "
                "returned %s. If the name is misspelt, its weight has no effect in the whole run.",
                ", ".join(missing),
                ", ".join(sorted(names)) or "no named reward",
            )
        self._never_seen -= set(names)


def make_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """The estimator of a section `grpo.adv_estimator`.

    Raises:
        ComponentImportError: its dotted path cannot be imported.
        WrongKindError: the path is not an `AdvantageEstimator`.
    """
    match config.name:
        case "grpo" | "rloo":
            return GroupEstimator(normalize=config.normalizes, leave_one_out=config.leaves_one_out)
        case "reinforce_plus_plus":
            return ReinforcePlusPlusEstimator(minus_baseline=config.minus_baseline)
        case "max_rl":
            return MaximumLikelihoodEstimator()
        case "optimal_token_baseline":
            return OptimalTokenBaselineEstimator()
        case "remax":
            return ReMaxEstimator()
        case "gdpo":
            return DecoupledEstimator(
                weights=config.reward_weights,
                normalize=config.normalizes,
                leave_one_out=config.leaves_one_out,
                normalize_batch=config.normalize_batch,
            )
        case "turn_level":
            return TurnLevelEstimator(
                discount=config.turn_discount, normalize=config.normalizes, leave_one_out=config.leaves_one_out
            )
        case path:
            estimator: AdvantageEstimator = Component.from_path(path).load(expect=AdvantageEstimator)(**config.kwargs)
            return estimator


def token_penalties(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] the penalty of each trained token; zeros if the KL is not part of the reward."""
    if "token_penalties" not in batch:
        return torch.zeros_like(batch["token_mask"])
    penalties: torch.Tensor = batch["token_penalties"] * batch["token_mask"]
    return penalties


def row_penalties(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B] the sum of the penalties of each row."""
    return token_penalties(batch).sum(-1)


def group_metrics(batch: BatchedDataDict[Any]) -> dict[str, float]:
    """Statistics of the rewards within groups."""
    group = per_group(batch["rewards"], batch["group_ids"], scored_R=batch.get("scored"))
    return {"advantage/equal_group_frac": group.equal_group_frac, "reward/group_std": group.mean_group_std}


def whiten(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = False) -> torch.Tensor:
    """Values normalized to mean 0 and standard deviation 1 over trained entries, and 0.0 elsewhere.

    If they are all equal up to rounding, all are 0.0.

    Args:
        values: any shape.
        mask: the same shape; above 0 for trained entries.
        unbiased: divide the sum of squares by n - 1 instead of n.
    """
    trained = mask > 0
    selected = values.double()[trained]
    if selected.numel() == 0 or bool(are_equal(selected.min(), selected.max())):
        return torch.zeros_like(values, dtype=torch.float32)
    whitened = (values.double() - selected.mean()) / selected.std(correction=int(unbiased))
    return torch.where(trained, whitened, 0.0).float()


def suffix_sums(values: torch.Tensor) -> torch.Tensor:
    """[B, T] the sum of each row's values from a position to the end."""
    return values.flip(-1).cumsum(-1).flip(-1)


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


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """The result of `group_advantages`."""

    values: torch.Tensor
    """[B] float32."""
    equal: torch.Tensor
    """[B] bool; True in groups with equal rewards, which have no learning signal."""
    equal_group_frac: float
    """Fraction of such groups."""
    mean_group_std: float
    """Mean over groups of the standard deviation of their rewards."""


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    scored: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
) -> GroupAdvantages:
    """Deprecated: use `rl_train.algorithms.grpo.group_relative` and `rl_train.rollouts.advantages.per_group`."""
    warnings.warn("group_advantages is replaced by group_relative and per_group.", DeprecationWarning, stacklevel=2)
    groups: dict[str, Any] = {"scored_R": scored, "sizes_R": sizes}
    group = per_group(rewards, group_ids, **groups)
    return GroupAdvantages(
        values=group_relative(rewards, group_ids, normalize=normalize, leave_one_out=leave_one_out, **groups),
        equal=group.equal_R,
        equal_group_frac=group.equal_group_frac,
        mean_group_std=group.mean_group_std,
    )


class PerRollout(AdvantageEstimator):
    """Deprecated: passes an estimator one row per rollout. `rl_train.step.rollouts` returns such rows.

    Args:
        estimator: estimates the advantages of rollouts.
    """

    def __init__(self, estimator: AdvantageEstimator) -> None:
        warnings.warn("PerRollout is not needed with rl_train.step.rollouts.", DeprecationWarning, stacklevel=2)
        self.estimator = estimator

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        joined = join_segments(batch)
        advantages = self.estimator(joined)
        rows = split_segments(BatchedDataDict[Any]({**joined, "advantages": advantages.values}))
        return Advantages(values=rows["advantages"], metrics=advantages.metrics)

    def is_informative(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        joined = join_segments(batch)
        rows = split_segments(BatchedDataDict[Any]({**joined, "informative": self.estimator.is_informative(joined)}))
        informative: torch.Tensor = rows["informative"]
        return informative
