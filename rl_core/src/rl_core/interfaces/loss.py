"""Loss functions: log-probabilities and a batch in, one scalar and its metrics out; they never see logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict

Reduction = Literal["sum", "token_mean", "min", "max"]
"""How shares of a metric are combined. `sum` and `token_mean` both add them up; a `token_mean` is a mean over trained tokens,
and covers only the computed ones if `LossFunction.rows_with_gradient` excludes rows."""


class LossType(Enum):
    """Unit that the loss is averaged over, across all ranks and microbatches of a global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossFunction(ABC):
    """A scalar function of log-probabilities, normalised by counts that the backend passes in.

    The gradient of a global batch is the sum of the gradients of its microbatches over all ranks, because every call
    divides by the *global* count: microbatching, packing and data parallelism do not change it.

    Attributes:
        loss_type: whether the loss is a mean over tokens or over sequences.
        metric_reductions: how each metric is reduced over microbatches and ranks; the default is `sum`, so a metric that
            is a mean must already be divided by its global count. Metrics of a loss with `rows_with_gradient` that are not 0
            on the excluded rows must be `token_mean`, `min` or `max`.
        rows_per_unit: number k of consecutive rows that belong together, such as the two of a preference pair: rows k·n to
            k·n + k - 1 of the batch stay adjacent, in order, on one rank and in one microbatch.
        candidates_key: the batch key [B, T, K] int64 of further tokens to score at each position. The backend computes their
            log-probabilities in the same pass, with gradient, and adds them to the data as `candidate_logprobs` [B, T, K]
            float32, in nats, 0.0 where `token_mask * sample_mask` is 0. Requires the capability `topk_logprobs`.
        on_policy: set by an algorithm that updates the same weights that scored the batch, so that log p before the update
            need not be in it.
        allows_dropout: whether the model's dropout may be on in training. It must be off if log-probabilities are compared
            with those of another pass (a ratio to the sampling policy, a reference policy, an old value), since dropout
            makes them differ for equal weights.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    metric_reductions: ClassVar[Mapping[str, Reduction]] = {}
    rows_per_unit: int = 1
    candidates_key: str | None = None
    on_policy: bool = False
    allows_dropout: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Name of the loss in messages."""
        return type(self).__name__

    @property
    def required_keys(self) -> frozenset[str]:
        """Batch keys that the loss reads in addition to `token_mask` and `sample_mask`."""
        return frozenset()

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Rows [B] bool that may contribute to the loss or its gradient; None, the default, if all may.

        The other rows are not computed in training. They still count in `global_valid_seqs` and `global_valid_toks`, so loss,
        gradient and optimizer step are the same as if they had been computed.

        Args:
            data: `token_mask` [B, T], `sample_mask` [B] and `required_keys`.
        """
        return None

    @abstractmethod
    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of one microbatch.

        Args:
            next_token_logprobs: [B, T] float32, in nats; position t scores token t given the tokens before it; 0.0 at
                position 0, on padding, and possibly wherever `token_mask * sample_mask` is 0. Carries the gradient.
            data: the rows of the microbatch: `token_mask` [B, T], `sample_mask` [B] and `required_keys`.
            global_valid_seqs: scalar float32, number of rows with `sample_mask` in the global batch over all ranks.
            global_valid_toks: scalar float32, number of tokens with `token_mask * sample_mask` in it.

        Returns:
            The loss of this microbatch's share of the global batch, and detached scalar metrics (shares as well).
        """
