"""RMSNorm and attention without Transformer Engine, for sequence parallelism, packed rows and context parallelism.

They replace `WrappedTorchNorm`, which does not support sequence parallelism, and `DotProductAttention`, which supports neither
packed rows nor context parallelism. With context parallelism, all keys and values of the group are gathered and a dense mask is
used: suitable for tests and moderate lengths. For long rows on GPUs, use Transformer Engine, which has ring attention.

A row of length L, a multiple of 2n, is split into 2n chunks over n context-parallel ranks; rank r has chunks r and 2n-1-r. Late
chunks attend to many tokens and early ones to few, so all pairs cost the same (Megatron-Core's layout).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

_SHORT: Final = 256
"""Row length up to which the CPU's backward pass through attention is faster in float32 than in bfloat16: four times as fast at
128 tokens, equally fast at 400."""


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, normalized in float32 (Zhang and Sennrich 2019).

    With `layernorm_zero_centered_gamma`, it is x / rms(x) * (1 + weight).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self._zero_centered = config.layernorm_zero_centered_gamma
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(ones)
        # Tells `finalize_model_grads` to sum this gradient over ranks, because each rank processed only some tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes `x` [..., hidden size] along its last axis; same shape and dtype."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._zero_centered:
            # Added in float32, because bfloat16 would lose small weights.
            return (h * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * h.to(x.dtype)


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's description of packed rows, with the borders also in host memory, so that no layer reads them back.

    Attributes:
        row_borders: `cu_seqlens_q` as numbers.
    """

    row_borders: tuple[int, ...] = ()


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Whether torch's variable-length kernel computes attention of this tensor."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


class SdpaCoreAttention(MegatronModule):
    """Causal attention with `scaled_dot_product_attention` for padded [s, b, heads, d] or packed [t, heads, d] rows.

    The arguments are those with which Megatron-Core builds any core attention.
    """

    flash: bool | None = None
    """Require a flash kernel (true), use the plain one (false), or the fastest (None); set by `attention_class`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale
        self.hidden_per_partition = divide(config.kv_channels * config.num_attention_heads, pg_collection.tp.size())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[s, b, heads * d], or [t, heads, d] for packed rows. Padding is on the right, so no mask is needed."""
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if self.cp is not None:
            return self._attend_context_parallel(query, key, value, packed_seq_params if packed else None)
        if packed:
            return self._attend_packed(query, key, value, packed_seq_params)
        return self._attend(query, key, value, None).reshape(query.size(0), query.size(1), self.hidden_per_partition)

    def _attend_packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: PackedRows) -> torch.Tensor:
        """[t, heads, d], without a synchronization with the device."""
        if self.flash is not False and has_varlen_kernel(query):
            longest = packing.max_seqlen_q
            output = varlen_attn(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                packing.cu_seqlens_q,
                packing.cu_seqlens_kv,
                longest,
                longest,
                scale=self.scale,
                window_size=(-1, 0),
                enable_gqa=query.size(1) != key.size(1),
            )
            assert isinstance(output, torch.Tensor)
            return output
        rows = [
            self._attend(query[start:end, None], key[start:end, None], value[start:end, None], None)[:, 0]
            for start, end in itertools.pairwise(packing.row_borders)
            if end > start
        ]
        return torch.cat(rows)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[s, b, heads, d]; causal if there is no mask."""
        dtype = query.dtype
        if query.device.type == "cpu" and dtype == torch.bfloat16 and len(query) <= _SHORT:
            # Also without gradients, so that scoring and training compute the same values.
            query, key, value = query.float(), key.float(), value.float()
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        with self._kernel():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
        return out.permute(2, 0, 1, 3).to(dtype)

    def _kernel(self) -> AbstractContextManager[None]:
        if self.flash is None:
            return nullcontext()
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION if self.flash else SDPBackend.MATH])

    def _attend_context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Any
    ) -> torch.Tensor:
        """This rank's queries with the keys and values of all ranks, whose gradients are returned to their ranks."""
        assert self.cp is not None
        ranks = self.cp.size()
        key, value = (
            gather_from_sequence_parallel_region(each, tensor_parallel_output_grad=True, group=self.cp) for each in (key, value)
        )
        if packing is None:
            lengths = [query.size(0) * ranks]
        else:
            lengths = [end - start for start, end in itertools.pairwise(packing.row_borders)]
        positions_by_rank = [_token_positions(lengths, ranks, rank).to(query.device) for rank in range(ranks)]
        own, everyone = positions_by_rank[self.cp.rank()], torch.cat(positions_by_rank, dim=1)
        mask = (own[0][:, None] == everyone[0]) & (everyone[1] <= own[1][:, None])
        if packing is not None:
            return self._attend(query[:, None], key[:, None], value[:, None], mask)[:, 0]
        out = self._attend(query, key, value, mask)
        return out.reshape(query.size(0), query.size(1), self.hidden_per_partition)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Attention has no weights."""
        return {}


def attention_class(flash: bool | None) -> type[SdpaCoreAttention]:
    """The attention class with the configured kernel."""
    return type("SdpaCoreAttention", (SdpaCoreAttention,), {"flash": flash})


def _token_positions(lengths: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """[2, t], row and position of each token on the rank."""
    parts = []
    for row, length in enumerate(lengths):
        positions = row_shard(length, ranks, rank)
        parts.append(torch.stack([torch.full_like(positions, row), positions]))
    return torch.cat(parts, dim=1)


def row_shard(length: int, ranks: int, rank: int) -> torch.Tensor:
    """[length / ranks] int64, positions of a row on the rank, in the order of its tensors.

    Args:
        length: tokens of the row, a multiple of twice the number of ranks.
        ranks: size of the context-parallel group.
        rank: rank in the group.
    """
    chunk = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late * chunk, (late + 1) * chunk)])


def packed_shard(lengths: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """As `row_shard` for rows packed end to end: positions in the packed row."""
    shards, start = [], 0
    for length in lengths:
        shards.append(row_shard(length, ranks, rank) + start)
        start += length
    return torch.cat(shards)


def sum_over_ranks(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over a group whose ranks compute the same result from it; gradients are passed back unchanged, not summed.

    Args:
        values: any shape; each rank fills in its own entries, and zeros elsewhere.
        group: the process group.
    """
    total: torch.Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
