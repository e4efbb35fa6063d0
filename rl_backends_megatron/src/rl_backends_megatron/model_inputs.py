"""Converts microbatches to model inputs for Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_backends_base import MicrobatchRows, ScoringInput, scored_tokens
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.layers import PackedRows, packed_shard, row_shard
from rl_backends_megatron.parallel import Ranks
from rl_core.backend import BatchedDataDict
from rl_core.data.shared_prefix import pack_rows


@dataclass(frozen=True, kw_only=True)
class ModelInput(ScoringInput):
    """One microbatch on one rank, with M scored tokens; `input_ids` are the tokens of this context-parallel rank.

    Attributes:
        position_ids: of the shape of `input_ids`; Megatron itself computes rotary positions.
        packing: boundaries of packed rows; None for padded rows.
    """

    position_ids: torch.Tensor
    packing: PackedRows | None


class Layout:
    """Lays out the rows of microbatches as inputs of this rank.

    Args:
        config: the section `policy`.
        ranks: rows are sharded over the context-parallel ranks.
    """

    def __init__(self, config: MegatronPolicyConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        # Next-token logits are at the previous token, values at the token itself.
        self._shift = 1 if config.head == "tokens" else 0
        megatron = config.megatron_cfg
        # Sequence parallelism shards a rank's tokens equally, context parallelism splits a row into 2n chunks.
        self._multiple = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
        if megatron.context_parallel_size > 1:
            self._multiple *= 2 * megatron.context_parallel_size

    def form(self, rows: MicrobatchRows) -> ModelInput:
        """The input of this rank's model."""
        ids, lengths, packing = rows.input_ids, rows.lengths, self._config.sequence_packing.enabled
        scored = scored_tokens(ids, lengths, rows.mask, shift=self._shift)
        return self._packed(ids, lengths, *scored) if packing else self._padded(ids, lengths, *scored)

    def _padded(self, ids: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> ModelInput:
        """Padded rows. Attention is causal and padding is on the right, so no mask is needed."""
        width = -(-max(int(lengths.max()), 1) // self._multiple) * self._multiple
        wide = torch.nn.functional.pad(ids[:, :width], (0, max(0, width - ids.shape[1])))
        group = self._ranks.context
        positions_here = torch.arange(width) if group.size() == 1 else row_shard(width, group.size(), group.rank())
        local_index = torch.full((width,), -1, dtype=torch.int64)
        local_index[positions_here] = torch.arange(len(positions_here))
        local = local_index[columns - self._shift]
        hidden_index = torch.where(local >= 0, rows * len(positions_here) + local, -1)
        positions = positions_here.expand(len(ids), -1)
        return self._on_device(wide[:, positions_here], positions, None, hidden_index, ids, rows, columns)

    def _packed(self, ids: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> ModelInput:
        """Rows end to end; attention takes their boundaries, and rotary positions restart there."""
        own = self._config.sequence_packing.sequence_length_pad_multiple
        multiple = torch.lcm(torch.tensor(own), torch.tensor(self._multiple)).item()
        packed = pack_rows({"input_ids": ids, "input_lengths": lengths}, pad_multiple=int(multiple))
        total = packed.input_ids.shape[1]
        group = self._ranks.context
        positions_here = torch.arange(total)
        if group.size() > 1:
            positions_here = packed_shard(packed.cu_seqlens.diff().tolist(), group.size(), group.rank())
        local_index = torch.full((total,), -1, dtype=torch.int64)
        local_index[positions_here] = torch.arange(len(positions_here))
        hidden_index = local_index[packed.cu_seqlens.to(torch.int64)[rows] + columns - self._shift]
        borders = packed.cu_seqlens.to(self._ranks.device)
        packing = PackedRows(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            cu_seqlens_q_padded=borders,
            cu_seqlens_kv_padded=borders,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
            row_borders=tuple(packed.cu_seqlens.tolist()),
        )
        positions = packed.position_ids[:, positions_here]
        return self._on_device(packed.input_ids[:, positions_here], positions, packing, hidden_index, ids, rows, columns)

    def _on_device(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packing: PackedRows | None,
        hidden_index: torch.Tensor,
        ids: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> ModelInput:
        is_local = hidden_index >= 0
        rows, columns = rows[is_local], columns[is_local]
        device = self._ranks.device
        return ModelInput(
            input_ids=input_ids.contiguous().to(device),
            position_ids=position_ids.contiguous().to(device),
            packing=packing,
            hidden_index=hidden_index[is_local].to(device),
            targets=ids[rows, columns].to(device),
            output_index=(rows * ids.shape[1] + columns).to(device),
            shape=(ids.shape[0], ids.shape[1]),
        )


def filler_microbatch(microbatch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """A microbatch of one token that has no effect: the interleaved schedule needs a multiple of the stages."""
    filler = microbatch.slice(0, 1)
    filler["input_lengths"] = torch.ones_like(filler["input_lengths"])
    return filler
