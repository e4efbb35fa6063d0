"""Attention on GPUs for packed rows and rows with a shared prefix: torch's variable-length kernel, which needs no mask.

The function is registered with Transformers. For rows with a shared prefix, it calls the kernel three times per layer, whatever
the number of prompts: prefixes attend to themselves, later tokens to their prompt's prefix, and the later tokens of each row
to the row's own. The last two are merged by their log-sum-exp; in the backward pass, each call gets the merged output and
log-sum-exp, as in `cpu_attention`. The operators are called directly for this, because autograd ignores a gradient of
the log-sum-exp. Its layout is [heads, tokens], in spite of the documentation of `varlen_attn` (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_backends_hf import torch_internals
from rl_backends_hf.cpu_attention import SharedPrefixBatch, require_plain
from rl_backends_hf.transformers_internals import replace_attention
from rl_core.data.batched_data_dict import to_device

VARLEN: Final = "rlcore_varlen"
"""Name of the attention function in Transformers' registry."""


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Sequences of one call of the kernel: queries of each attend to its keys.

    Attributes:
        queries: [R + 1] int32, where each sequence's queries start and end.
        keys: [R + 1] int32, the same for its keys and values.
        max_queries: number of queries of the longest.
        max_keys: number of keys of the longest.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, queries: list[int], keys: list[int], device: torch.device) -> Borders:
        """The borders of sequences of these lengths."""
        starts = (to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device) for lengths in (queries, keys))
        first, second = starts
        return cls(queries=first, keys=second, max_queries=max(queries, default=0), max_keys=max(keys, default=0))


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Layout of rows with shared prefixes on the device of the model; computed once per microbatch, not per layer.

    Attributes:
        prefix: [P] int64, index of each token of a prefix.
        later: [L] int64, index of each other token.
        after: [M] int64, which of the later tokens have a prefix.
        prefixes: borders of the prefixes.
        rows: borders of the rows' later tokens.
        across: borders of the `after` tokens of each prompt, and its prefix.
    """

    prefix: torch.Tensor
    later: torch.Tensor
    after: torch.Tensor
    prefixes: Borders
    rows: Borders
    across: Borders

    @classmethod
    def of(cls, shared: SharedPrefixBatch, device: torch.device) -> SharedRows:
        """The layout of a microbatch on the CPU."""
        prefix: list[int] = []
        later: list[int] = []
        after: list[int] = []
        rows: list[int] = []
        pairs: list[tuple[int, int]] = []
        lengths: list[int] = []
        for segment in shared.segments:
            middle = segment.start + segment.prefix
            prefix += range(segment.start, middle)
            lengths += [segment.prefix] if segment.prefix else []
            if segment.prefix:
                after += range(len(later), len(later) + segment.end - middle)
                pairs.append((segment.end - middle, segment.prefix))
            later += range(middle, segment.end)
            width = segment.own.shape[1]
            rows += torch.bincount(segment.own_tokens // max(width, 1), minlength=len(segment.own)).tolist()
        index = (to_device(torch.tensor(each, dtype=torch.int64), device) for each in (prefix, later, after))
        return cls(
            **dict(zip(("prefix", "later", "after"), index, strict=True)),
            prefixes=Borders.of(lengths, lengths, device),
            rows=Borders.of(rows, rows, device),
            across=Borders.of([queries for queries, _ in pairs], [keys for _, keys in pairs], device),
        )


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: Borders | None = None,
    shared_prefix: SharedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the signature that Transformers expects; with `packed_rows` or `shared_prefix`, the variable-length kernel.

    `packed_rows` are the borders of rows that are packed end to end; with them, too, B is 1 and the mask is ignored. Other
    arguments and the result are as in `cpu_sdpa`.

    Raises:
        NotSupportedError: for attention with a window, a soft cap, a bias, sinks or dropout.
    """
    if packed_rows is None and shared_prefix is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    require_plain(module, kwargs)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = kwargs.get("scaling")
    if packed_rows is not None:
        return attend_packed(q, k, v, packed_rows, scale).unsqueeze(0), None
    merged: torch.Tensor = _SharedPrefixAttention.apply(q, k, v, shared_prefix, scale)  # type: ignore[no-untyped-call]
    return merged.unsqueeze(0), None


# Compiled code would be compiled again for each layout of rows.
ALL_ATTENTION_FUNCTIONS.register(VARLEN, torch.compiler.disable(varlen_attention))
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, sdpa_mask)


def use_varlen(model: PreTrainedModel, *, computed_in: torch.dtype) -> bool:
    """Use `varlen_attention` instead of SDPA in `model`, if its device and dtype allow it; returns whether it is used."""
    if model.device.type != "cuda" or computed_in not in (torch.float16, torch.bfloat16):
        return False
    return replace_attention(model, VARLEN)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Borders, scale: float | None
) -> torch.Tensor:
    """Causal attention of packed rows [N, heads, D], differentiable."""
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        rows.queries,
        rows.keys,
        rows.max_queries,
        rows.max_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output


class _SharedPrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shared: SharedRows, scale: float | None
    ) -> torch.Tensor:
        prefix_keys, prefix_values = (each.index_select(0, shared.prefix) for each in (key, value))
        later = query.index_select(0, shared.later)
        output, lse = query.new_empty(query.shape), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        output[shared.prefix], lse[:, shared.prefix] = _attend(
            query.index_select(0, shared.prefix), prefix_keys, prefix_values, shared.prefixes, scale, causal=True
        )
        own_keys, own_values = (each.index_select(0, shared.later) for each in (key, value))
        own, own_lse = _attend(later, own_keys, own_values, shared.rows, scale, causal=True)
        across, across_lse = _attend(later[shared.after], prefix_keys, prefix_values, shared.across, scale, causal=False)
        merged, merged_lse = own.float(), own_lse.float()
        row_lse, across_lse = merged_lse[:, shared.after], across_lse.float()
        whole = torch.logaddexp(row_lse, across_lse)
        weights = ((each - whole).exp().t().unsqueeze(-1) for each in (row_lse, across_lse))
        row_weight, across_weight = weights
        merged[shared.after] = merged[shared.after] * row_weight + across.float() * across_weight
        merged_lse[:, shared.after] = whole
        output[shared.later], lse[:, shared.later] = merged.to(output.dtype), merged_lse
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.shared, ctx.scale = shared, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        query, key, value, output = tensors
        shared: SharedRows = ctx.shared
        # Tokens of a prefix get gradients from two calls, and so do later ones; they are added in float32.
        gradients = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
        calls = (
            (shared.prefix, shared.prefix, shared.prefixes, True),
            (shared.later, shared.later, shared.rows, True),
            (shared.later[shared.after], shared.prefix, shared.across, False),
        )
        for queries, keys, borders, causal in calls:
            shares = _differentiate(
                grad.index_select(0, queries),
                query.index_select(0, queries),
                key.index_select(0, keys),
                value.index_select(0, keys),
                output.index_select(0, queries),
                lse.index_select(1, queries),
                borders,
                ctx.scale,
                causal=causal,
            )
            for total, share, index in zip(gradients, shares, (queries, keys, keys), strict=True):
                total.index_add_(0, index, share.float())
        return *(each.to(grad.dtype) for each in gradients), None, None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: Borders, scale: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, heads, D] and log-sum-exp [heads, N] float32."""
    if not len(query):
        return query, query.new_empty(query.shape[1], 0, dtype=torch.float32)
    output, lse, _ = torch_internals.varlen_attention(
        query,
        key,
        value,
        borders.queries,
        borders.keys,
        borders.max_queries,
        borders.max_keys,
        causal,
        scale,
        _window(causal),
        query.shape[1] != key.shape[1],
    )
    return output, lse


def _differentiate(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    borders: Borders,
    scale: float | None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    if not len(query):
        return query, torch.zeros_like(key), torch.zeros_like(value)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = torch_internals.varlen_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        output,
        lse.contiguous(),
        borders.queries,
        borders.keys,
        borders.max_queries,
        borders.max_keys,
        causal,
        no_dropout,
        scale,
        _window(causal),
    )
    return gradients


def _window(causal: bool) -> list[int]:
    return [-1, 0] if causal else [-1, -1]
