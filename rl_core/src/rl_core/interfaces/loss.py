"""What a loss is: log-probabilities and a batch in, one scalar and its metrics out; it never sees logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict

Reduction = Literal["sum", "min", "max"]


class LossType(Enum):
    """What the loss is a mean of, over all ranks and microbatches of a global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossFunction(ABC):
    """A scalar of log-probabilities, normalised by a count that the backend hands in.

    The gradient of a global batch is the sum of the gradients of its microbatches over all ranks, because every call
    divides by the *global* count: neither microbatching, packing nor data parallelism changes it.

    Attributes:
        loss_type: whether the loss is a mean over tokens or over sequences.
        metric_reductions: how a metric of several microbatches and ranks becomes one number; `sum` unless named here,
            so a metric that is a mean is returned already divided by its global count.
        rows_per_unit: rows that it reads together, such as the two of a pair: rows k·n up to k·n + k - 1 of the batch stay
            neighbours, in order, on one rank and in one microbatch.
        candidates_key: the batch key [B, T, K] int64 of further tokens whose log-probabilities it reads at each position; the
            backend computes them in the same pass, with their gradient, and puts them into the data as `candidate_logprobs`
            [B, T, K] float32, in nats, 0.0 where `token_mask * sample_mask` is 0. Only backends with the capability
            `topk_logprobs` do so.
        on_policy: set by an algorithm whose update is made with the weights that scored the batch, so that log p before the
            update need not be in it.
        allows_dropout: whether the model's own dropout may be on while the loss is trained. It must be off where
            log-probabilities are compared with those of another pass (a ratio to the policy that sampled, a reference policy,
            an old value), since with dropout they would differ for equal weights.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    metric_reductions: ClassVar[Mapping[str, Reduction]] = {}
    rows_per_unit: int = 1
    candidates_key: str | None = None
    on_policy: bool = False
    allows_dropout: ClassVar[bool] = False

    @property
    def required_keys(self) -> frozenset[str]:
        """The batch keys that it reads besides `token_mask` and `sample_mask`."""
        return frozenset()

    @abstractmethod
    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Score one microbatch.

        Args:
            next_token_logprobs: [B, T] float32, in nats; position t scores token t given the tokens before it; 0.0 at
                position 0, on padding, and possibly wherever `token_mask * sample_mask` is 0. Carries the gradient.
            data: the rows of the microbatch: `token_mask` [B, T], `sample_mask` [B] and `required_keys`.
            global_valid_seqs: scalar float32, the rows with `sample_mask` of the global batch over all ranks.
            global_valid_toks: scalar float32, the tokens with `token_mask * sample_mask` of the global batch over all
                ranks.

        Returns:
            The scalar loss of this share of the global batch, and detached scalar metrics (shares as well).
        """
