"""Staleness of rollouts in steps, checked in every batch against the versions of its tokens, and in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_train.weight_versions import trained_tokens


def staleness(batch: BatchedDataDict[Any], version: int) -> torch.Tensor:
    """[N] int64: the version being trained minus the oldest version of a trained token, for the N rows that have one.

    Args:
        batch: rollouts with `token_versions`, `token_mask` and `sample_mask`.
        version: the weight version that the step starts with.
    """
    newest = torch.iinfo(torch.int64).max
    oldest = torch.where(trained_tokens(batch), batch["token_versions"], newest).amin(-1)
    return version - oldest[oldest < newest]


def staleness_metrics(batch: BatchedDataDict[Any], version: int) -> dict[str, float]:
    """`staleness/mean` and `staleness/max` over rows; none for rows that were not sampled, such as answers of the data."""
    if "token_versions" not in batch:
        return {}
    lags = staleness(batch, version)
    return {"staleness/mean": float(lags.double().mean()), "staleness/max": float(lags.max())} if len(lags) else {}


def refuse_other_versions(batch: BatchedDataDict[Any], began: Sequence[int]) -> None:
    """With exact batches, every token of a group has the weights with which the group began.

    Args:
        batch: rollouts with `token_versions`, `token_mask` and `rollout_ids`.
        began: weight version of each rollout when it began; -1 if it is unknown.

    Raises:
        RLCoreError: a token has other weights.
    """
    expected = torch.tensor(began)[batch["rollout_ids"]].unsqueeze(-1)
    others = (batch["token_mask"] > 0) & (batch["token_versions"] != expected) & (expected >= 0)
    if bool(others.any()):
        raise RLCoreError(
            f"rollout.order is exact, but rollouts that began with weight version {int(expected[others.any(-1)][0])} have "
            f"tokens of version {int(batch['token_versions'][others][0])}: a generation worker was restarted after the policy "
            "had been trained. Resume the run from its last checkpoint."
        )


class DeliveredVersions:
    """The weight versions with which rows may have been sampled, and the steps whose refits delivered them.

    The staleness of a token is the step that trains it minus the last step whose refit delivered the weights that sampled it.
    It is counted in steps, because a step may take several optimizer steps or none.

    Args:
        max_staleness: the bound.
        weight_version: the version of the engine's weights.
    """

    def __init__(self, max_staleness: int, weight_version: Callable[[], int | None]) -> None:
        self._max_staleness, self._weight_version = max_staleness, weight_version
        self._steps: dict[int | None, int] = {}

    def state_dict(self) -> list[list[int | None]]:
        """Versions with their steps, as JSON."""
        return [[version, step] for version, step in self._steps.items()]

    def load_state_dict(self, state: Sequence[tuple[int | None, int]]) -> None:
        """Continue from `state_dict`."""
        self._steps = dict(state)

    def record(self, step: int) -> None:
        """The engine now has the weights that `step` starts with; forget those that are too old."""
        self._steps[self._weight_version()] = step
        self._steps = {version: at for version, at in self._steps.items() if at >= step - self._max_staleness}

    def staleness(self, batch: BatchedDataDict[Any], step: int) -> dict[str, float]:
        """`staleness/steps_mean` and `_max` over rows, of the oldest token of each, and `rollout/mixed_version_frac`.

        Args:
            batch: rollouts with `token_versions` and `token_mask`.
            step: the step that trains them.

        Raises:
            RLCoreError: a token exceeds the bound.
        """
        sampled = batch["token_mask"] > 0
        versions = torch.where(sampled, batch["token_versions"], torch.iinfo(torch.int64).max)
        for version in versions[sampled].unique().tolist():
            if version not in self._steps:
                raise RLCoreError(
                    f"Step {step} would train on tokens that weight version {version} sampled, but rollout.max_staleness "
                    f"({self._max_staleness}) allows only the versions of the engine since step "
                    f"{max(step - self._max_staleness, 0)}: {', '.join(map(str, self._steps))}. The engine reports "
                    "wrong versions, or the scheduler exceeded its bound."
                )
        lags = [float(step - self._steps[oldest]) for oldest in versions.amin(-1).tolist() if oldest in self._steps]
        if not lags:
            return {}
        newest = torch.where(sampled, batch["token_versions"], -1).amax(-1)
        mixed = int((newest > versions.amin(-1)).sum())
        return {
            "staleness/steps_mean": sum(lags) / len(lags),
            "staleness/steps_max": max(lags),
            "rollout/mixed_version_frac": mixed / len(lags),
        }
