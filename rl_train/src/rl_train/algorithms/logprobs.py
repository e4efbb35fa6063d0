"""Log-probabilities of a step's rows under the policy and the reference policy, before the policy is trained."""

from __future__ import annotations

from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.testing.outputs.models import scored
from rl_train.algorithms.kl_penalty import kl_in_reward
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.run import Run
from rl_train.weight_versions import stale_mask


class ScoreRollouts:
    """Adds the log-probabilities that the loss and a KL penalty in the reward need to the rows of a step.

    Only computes what is used: not `prev_logprobs` if the loss is on-policy or compares with the sampler, and not
    `reference_policy_logprobs` if nothing is compared with the reference policy.

    Args:
        run: its policy scores the rows; an adaptive penalty weight is saved in its checkpoints.
    """

    def __init__(self, run: Run) -> None:
        self._policy, self._loss_fn = run.policy, run.loss_fn
        self._penalize = kl_in_reward(run.config.loss_fn)
        if self._penalize is not None and self._penalize.controller is not None:
            run.keep("adaptive_kl", self._penalize.controller)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Add the needed keys to the batch; returns metrics of the penalty, if there is one."""
        if isinstance(self._loss_fn, ClippedPGLossFn):
            stale = stale_mask(batch, self._policy.weight_version)
            self._loss_fn.has_stale_tokens = stale is not None
            if stale is not None:
                batch["stale_mask"] = stale
        needed = self._loss_fn.required_keys | (self._penalize.required_keys if self._penalize else frozenset())
        if "prev_logprobs" in needed:
            batch["prev_logprobs"] = scored(self._policy.get_logprobs, batch)["logprobs"]
        if "reference_policy_logprobs" in needed:
            scores = scored(self._policy.get_reference_policy_logprobs, batch)
            batch["reference_policy_logprobs"] = scores["reference_logprobs"]
        return self._penalize(batch) if self._penalize is not None else {}
