"""Cuts a batch into microbatches and gives each the form in which the model reads it; knows no loss and no optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.scalar_head import ValueScoring
from rl_backends_hf.scoring import ScoringInput, packed_input, padded_input
from rl_backends_hf.token_scoring import TokenScoring
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError


class Microbatcher:
    """Microbatches as the config asks for them: by count, by token budget, or packed.

    Args:
        config: the policy's section.
        device: where the model is.
    """

    def __init__(self, config: HFPolicyConfig, *, device: torch.device) -> None:
        self._config, self._device = config, device
        self._lag = (ValueScoring if config.head == "scalar" else TokenScoring).lag
        self.packing = config.sequence_packing.enabled
        self.variable_length_kernel = config.hf_cfg.attn_implementation == "flash_attention_2" and device.type == "cuda"

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

    def form(self, microbatch: BatchedDataDict[Any], *, training: bool) -> ScoringInput:
        """The microbatch as the model reads it.

        Args:
            microbatch: `input_ids`, `input_lengths`, and for training `token_mask` and `sample_mask`.
            training: score only tokens with `token_mask * sample_mask`; otherwise all.

        Raises:
            DataError: a row is longer than `max_total_sequence_length`, or than the batch is wide.
        """
        ids, lengths = microbatch["input_ids"], microbatch["input_lengths"].to("cpu", torch.int64)
        self._check(ids, lengths)
        mask = microbatch["token_mask"] * microbatch["sample_mask"].unsqueeze(1) if training else None
        if self.packing:
            return packed_input(
                ids,
                lengths,
                device=self._device,
                lag=self._lag,
                mask=mask,
                pad_multiple=self._config.sequence_packing.sequence_length_pad_multiple,
                variable_length_kernel=self.variable_length_kernel,
            )
        return padded_input(ids, lengths, device=self._device, lag=self._lag, mask=mask)

    def _check(self, ids: torch.Tensor, lengths: torch.Tensor) -> None:
        longest, limit = int(lengths.max()), self._config.max_total_sequence_length
        if longest > ids.shape[1]:
            raise DataError(f"`input_lengths` says {longest} tokens where `input_ids` is {ids.shape[1]} wide.")
        if longest > limit:
            raise DataError(
                f"A row has {longest} tokens; `policy.max_total_sequence_length` allows {limit}. Raise it, or shorten the row."
            )
