"""Converts microbatches to model inputs."""

from __future__ import annotations

from typing import Any

import torch

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.scoring.scalar_head import ValueScoring
from rl_backends_hf.scoring.scoring_model import ScoringInput, packed_input, padded_input, shared_input
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_core.backend import BatchedDataDict, MicrobatchSplitter


class Microbatcher(MicrobatchSplitter):
    """Splits batches into microbatches as configured, and converts them to model inputs.

    Args:
        config: the section `policy`.
        device: device of the model.

    Attributes:
        shares_prefixes: whether rows with the same `prompt_id` are computed as one sequence; set once the model is known to
            support it.
        variable_length_kernel: attention function that takes sequence boundaries, if any.
    """

    def __init__(self, config: HFPolicyConfig, *, device: torch.device) -> None:
        super().__init__(config)
        self._config, self._device = config, device
        self._shift = (ValueScoring if config.head == "scalar" else TokenScoring).shift
        self.shares_prefixes = False
        flash = config.hf_cfg.attn_implementation == "flash_attention_2" and device.type == "cuda"
        self.variable_length_kernel: str | None = "flash_attention_2" if flash else None

    def form(self, microbatch: BatchedDataDict[Any], *, training: bool, candidates_key: str | None = None) -> ScoringInput:
        """Convert a microbatch to model input.

        Args:
            microbatch: `input_ids`, `input_lengths`, for training `token_mask` and `sample_mask`, and `prompt_id` if rows of a
                prompt should share their prefix.
            training: score only tokens with `token_mask * sample_mask`; otherwise all.
            candidates_key: column [b, T, K] of further tokens to score at the same positions.

        Raises:
            DataError: a row is longer than `max_total_sequence_length` or than the batch's width.
        """
        read = self.read(microbatch, training=training)
        ids, lengths, mask = read.input_ids, read.lengths, read.mask
        if self.shares_prefixes and read.prompt_ids is not None:
            formed = shared_input(ids, lengths, read.prompt_ids, device=self._device, shift=self._shift, mask=mask)
        elif self.packing:
            formed = packed_input(
                ids,
                lengths,
                device=self._device,
                shift=self._shift,
                mask=mask,
                pad_multiple=self._config.sequence_packing.sequence_length_pad_multiple,
                variable_length_kernel=self.variable_length_kernel,
            )
        else:
            formed = padded_input(ids, lengths, device=self._device, shift=self._shift, mask=mask)
        return formed if candidates_key is None else formed.with_candidates(microbatch[candidates_key])
