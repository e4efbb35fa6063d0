"""A rank's rows as the microbatches of their plan, and what of each is read; knows no model, and no form in which it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MicrobatchRows:
    """What a model reads of one microbatch.

    Attributes:
        input_ids: [b, T] int64.
        lengths: [b] int64, tokens of each row; on the CPU.
        mask: [b, T]; above 0 where a token counts; None where all do.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None


class MicrobatchCutter:
    """Microbatches as the config asks for them: by count, by token budget, or packed.

    Args:
        config: the section `policy` of any backend.

    Attributes:
        packing: whether a microbatch's rows are laid end to end.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._limit = config.max_total_sequence_length
        self.packing = config.sequence_packing.enabled

    def split(self, batch: BatchedDataDict[Any], *, rows: int) -> Iterator[BatchedDataDict[Any]]:
        """Microbatches of one global batch, in the order of its rows.

        Args:
            batch: carries a plan where token budget or packing is on (`shard_by_batch_size` makes it).
            rows: rows of a microbatch where there is no plan.
        """
        if batch.micro_batch_indices is None:
            return batch.make_microbatch_iterator(rows)
        if self.packing:
            return batch.make_microbatch_iterator_for_packable_sequences()
        return batch.make_microbatch_iterator_with_dynamic_shapes()

    def read(self, microbatch: BatchedDataDict[Any], *, training: bool) -> MicrobatchRows:
        """The columns that a model reads.

        Args:
            microbatch: `input_ids`, `input_lengths`, and for training `token_mask` and `sample_mask`.
            training: only tokens with `token_mask * sample_mask` count; otherwise all.

        Raises:
            DataError: a row is longer than `max_total_sequence_length`, or than the batch is wide.
        """
        ids, lengths = microbatch["input_ids"], microbatch["input_lengths"].to("cpu", torch.int64)
        longest = int(lengths.max())
        if longest > ids.shape[1]:
            raise DataError(f"`input_lengths` says {longest} tokens where `input_ids` is {ids.shape[1]} wide.")
        if longest > self._limit:
            raise DataError(
                f"A row has {longest} tokens; `policy.max_total_sequence_length` allows {self._limit}. Raise it, or shorten "
                "the row."
            )
        mask = microbatch["token_mask"] * microbatch["sample_mask"].unsqueeze(1) if training else None
        return MicrobatchRows(input_ids=ids, lengths=lengths, mask=mask)
