"""The rows and the loss with which the kit trains policies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction
from rl_core.testing.reference.model import FIRST_BYTE, VOCABULARY

NUM_ROWS, WIDTH = 8, 24


class KitLoss(LossFunction):
    """Minus the mean weighted probability of tokens, and of rows: each token has its own gradient, and both counts are used."""

    metric_reductions: ClassVar = {"weighted_logprobs": "sum"}

    @property
    def required_keys(self) -> frozenset[str]:
        return frozenset({"advantages"})

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        weighted = mask * data["advantages"] * (next_token_logprobs / 8).exp()
        rows = (weighted.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / global_valid_seqs
        metric = (mask * data["advantages"] * next_token_logprobs.detach()).sum() / global_valid_toks
        return -weighted.sum() / global_valid_toks - rows, {"weighted_logprobs": metric}


class NanGradientLoss(LossFunction):
    """A loss of 0 whose gradient is NaN in the first microbatch of each rank."""

    def __init__(self, rows_per_unit: int) -> None:
        self.rows_per_unit, self._is_first = rows_per_unit, True

    def __call__(self, next_token_logprobs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss, without metrics."""
        is_first, self._is_first = self._is_first, False
        mean = next_token_logprobs.mean()
        return ((mean * 0.0).sqrt() if is_first else mean - mean.detach()), {}


def make_rows(*, seed: int) -> BatchedDataDict[Any]:
    """Rows of unequal lengths with the columns of training; row 2 is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, WIDTH + 1, (NUM_ROWS,), generator=generator)
    lengths[0] = WIDTH
    position = torch.arange(WIDTH)
    inside = position < lengths.unsqueeze(1)
    ids = torch.randint(FIRST_BYTE, VOCABULARY - 2, (NUM_ROWS, WIDTH), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(inside, ids, 0),
        input_lengths=lengths,
        token_mask=(inside & (position >= 3)).float(),
        sample_mask=(torch.arange(NUM_ROWS) != 2).float(),
        advantages=torch.where(inside, torch.randn((NUM_ROWS, WIDTH), generator=generator), 0.0),
    )


def with_filler(rows: BatchedDataDict[Any], number: int) -> BatchedDataDict[Any]:
    """The rows and copies of the first ones that `sample_mask` excludes."""
    filler: BatchedDataDict[Any] = BatchedDataDict({**rows.slice(0, number), "sample_mask": torch.zeros(number)})
    return BatchedDataDict.from_batches([rows, filler])
