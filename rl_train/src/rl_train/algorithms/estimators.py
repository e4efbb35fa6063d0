"""Advantage estimators: from the rewards of a batch to what each trained token is worth; `grpo.adv_estimator` chooses.

A reward is a number for a whole row, `rewards` [B]. Where the KL to the reference policy is part of the reward, each token also
costs `token_penalties` [B, T]. Estimators that compare rows take the sum of a row's penalties from its reward; one that
looks at tokens takes the sum from each token on.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.plugins.component import Component
from rl_train.algorithms.advantages import from_here_on, group_advantages, whiten
from rl_train.algorithms.grpo_config import AdvantageConfig

_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What each token is worth."""

    values: torch.Tensor
    """[B, T] float32; 0.0 where `token_mask` is 0."""
    metrics: dict[str, float]
    """What rewards and advantages looked like."""


class AdvantageEstimator(ABC):
    """Estimates advantages; reads `rewards`, `group_ids`, `token_mask`, `sample_mask` and what it asks for."""

    @abstractmethod
    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        """The advantages of a step's rows."""

    def teaches(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """[B] bool: False in the rows of groups that teach nothing, which dynamic sampling replaces."""
        return ~group_advantages(batch["rewards"], batch["group_ids"]).equal


class GroupEstimator(AdvantageEstimator):
    """Rewards compared within the group: GRPO, and RLOO by its other settings.

    Args:
        normalize: divide by the group's standard deviation.
        leave_one_out: centre on the mean of the others.
    """

    def __init__(self, *, normalize: bool, leave_one_out: bool) -> None:
        self.normalize, self.leave_one_out = normalize, leave_one_out

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        rewards = batch["rewards"] - row_penalties(batch)
        found = group_advantages(rewards, batch["group_ids"], normalize=self.normalize, leave_one_out=self.leave_one_out)
        return Advantages(values=found.values.unsqueeze(-1) * batch["token_mask"], metrics=group_metrics(batch))


class ReinforcePlusPlusEstimator(AdvantageEstimator):
    """Rewards compared with all of the batch: REINFORCE++, https://arxiv.org/abs/2501.03262.

    A token's advantage is the row's reward less the penalties from that token on, normalised over all trained tokens.

    Args:
        minus_baseline: take each group's mean from its rewards first (REINFORCE++-baseline).
    """

    def __init__(self, *, minus_baseline: bool) -> None:
        self.minus_baseline = minus_baseline

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        rewards = batch["rewards"]
        if self.minus_baseline:
            rewards = group_advantages(rewards, batch["group_ids"], normalize=False).values
        penalties = token_penalties(batch)
        values = rewards.unsqueeze(-1) - from_here_on(penalties)
        mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
        return Advantages(values=whiten(values, mask), metrics=group_metrics(batch))


class DecoupledEstimator(AdvantageEstimator):
    """Several named rewards, each compared within the group by itself: GDPO, https://arxiv.org/abs/2601.05242.

    Normalizing the sum, as GRPO does, gives different combinations of rewards the same advantage; normalizing first keeps
    them apart. The weighted sum of the advantages is then normalized over the trained rows of the batch, with the unbiased
    standard deviation (n - 1), as that of a group; the paper does not say which, and TRL uses the unbiased one.

    A reward that a row does not have counts as 0.0. A reward that no row of a step has contributes nothing to the step.

    Args:
        weights: of the rewards, by name; 1 for one that is not named.
        leave_one_out: centre on the mean of the others.
        normalize: divide each by the group's standard deviation.
        normalize_batch: normalise the sum over all trained rows.
    """

    def __init__(self, *, weights: dict[str, float], normalize: bool, leave_one_out: bool, normalize_batch: bool) -> None:
        self.weights, self.normalize, self.leave_one_out = weights, normalize, leave_one_out
        self.normalize_batch = normalize_batch
        self._never_seen, self._has_warned = set(weights), False

    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        total, parts = torch.zeros(batch.size), self._parts(batch)
        self._warn_of_absent(parts)
        for name, rewards in parts.items():
            found = group_advantages(rewards, batch["group_ids"], normalize=self.normalize, leave_one_out=self.leave_one_out)
            total += self.weights.get(name, 1.0) * found.values
        if self.normalize_batch:
            trained = batch["sample_mask"] * (batch["token_mask"].sum(-1) > 0)
            total = whiten(total, trained, unbiased=True)
        return Advantages(values=total.unsqueeze(-1) * batch["token_mask"], metrics=group_metrics(batch))

    def teaches(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        differs = torch.zeros(batch.size, dtype=torch.bool)
        for name, rewards in self._parts(batch).items():
            if self.weights.get(name, 1.0) != 0:
                differs |= ~group_advantages(rewards, batch["group_ids"]).equal
        return differs

    def _parts(self, batch: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        rows: list[dict[str, float]] = batch["reward_parts"]
        names = sorted({name for row in rows for name in row})
        return {name: torch.tensor([row.get(name, 0.0) for row in rows]) for name in names}

    def _warn_of_absent(self, names: Collection[str]) -> None:
        """Warn once of weights whose rewards have not been seen: rare rewards are fine, misspelt names are not."""
        absent = sorted(self._never_seen - set(names))
        if absent and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "grpo.adv_estimator.reward_weights names %s, but no rollout of this step has such a reward; the environments "
                "returned %s. If the name is misspelt, its weight has no effect in the whole run.",
                ", ".join(absent),
                ", ".join(sorted(names)) or "no named reward",
            )
        self._never_seen -= set(names)


def make_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """The estimator that a section `grpo.adv_estimator` names.

    Raises:
        ComponentImportError: it is given by a dotted path that cannot be imported.
        WrongKindError: the path leads to something else.
    """
    match config.name:
        case "grpo" | "rloo":
            return GroupEstimator(normalize=config.normalizes, leave_one_out=config.leaves_one_out)
        case "reinforce_plus_plus":
            return ReinforcePlusPlusEstimator(minus_baseline=config.minus_baseline)
        case "gdpo":
            return DecoupledEstimator(
                weights=config.reward_weights,
                normalize=config.normalizes,
                leave_one_out=config.leaves_one_out,
                normalize_batch=config.normalize_batch,
            )
        case path:
            estimator: AdvantageEstimator = Component.from_path(path).load(expect=AdvantageEstimator)(**config.kwargs)
            return estimator


def token_penalties(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] what each trained token costs; zeros where the KL is no part of the reward."""
    if "token_penalties" not in batch:
        return torch.zeros_like(batch["token_mask"])
    penalties: torch.Tensor = batch["token_penalties"] * batch["token_mask"]
    return penalties


def row_penalties(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B] what the tokens of each row cost together."""
    return token_penalties(batch).sum(-1)


def group_metrics(batch: BatchedDataDict[Any]) -> dict[str, float]:
    """How the rewards of groups differ."""
    found = group_advantages(batch["rewards"], batch["group_ids"])
    return {"advantage/equal_group_frac": found.equal_group_frac, "reward/group_std": found.mean_group_std}
