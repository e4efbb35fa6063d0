"""What the policy and its reference say of a step's rows before the step changes the policy, as far as somebody reads it."""

from __future__ import annotations

from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.kl_penalty import kl_in_reward
from rl_train.run import Run


class ScoreRollouts:
    """Completes the rows of a step for the loss and for a penalty in the reward.

    A pass over the rows is made only where its result is read: `prev_logprobs` is not where the loss is on policy, and
    `reference_policy_logprobs` where nothing is compared with the reference policy.

    Args:
        run: its policy is asked; a penalty whose weight moves is kept with its checkpoints.
    """

    def __init__(self, run: Run) -> None:
        self._policy, self._loss_fn = run.policy, run.loss_fn
        self._penalize = kl_in_reward(run.config.loss_fn)
        if self._penalize is not None and self._penalize.controller is not None:
            run.keep("adaptive_kl", self._penalize.controller)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Write into the batch what is read of it; returns metrics of the penalty, if there is one."""
        needed = self._loss_fn.required_keys | (self._penalize.required_keys if self._penalize else frozenset())
        if "prev_logprobs" in needed:
            batch["prev_logprobs"] = self._policy.get_logprobs(batch)["logprobs"]
        if "reference_policy_logprobs" in needed:
            batch["reference_policy_logprobs"] = self._policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        return self._penalize(batch) if self._penalize is not None else {}
