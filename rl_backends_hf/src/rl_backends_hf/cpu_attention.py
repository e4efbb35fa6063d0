"""Attention on CPUs: rows with a shared prefix, and a faster backward pass for short rows in bfloat16.

Rows that share a prompt are one sequence: the common prefix once, followed by the rest of each row. A token of a row attends to
the prefix and to the row's own tokens before it, and its position is that in its row. The function is registered with
Transformers and takes the layout of a `SharedPrefixBatch` as the keyword argument `shared_prefix`, which models pass on to
their attention function. Each prompt is computed in three calls of the flash kernel:

1. the prefix attends to itself (causal);
2. all later tokens attend to the prefix (no mask);
3. the later tokens of each row attend to the row's own (causal, one batch element per row).

2 and 3 are merged by their log-sum-exp, as in blockwise attention: with outputs o2 and o3, o = w2 o2 + w3 o3 and
w_i = exp(lse_i - lse), lse = log(exp(lse2) + exp(lse3)). In the backward pass, each call gets the merged output and
log-sum-exp, with which the kernel computes its share of the gradient (https://arxiv.org/abs/2205.14135, algorithm 4). No mask
is materialized, so memory grows linearly with the number of tokens.

Without a shared prefix, the forward pass is SDPA. In bfloat16, the backward pass of short rows is computed in float32, because
the kernel is several times as slow in bfloat16 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_backends_hf.torch_internals import flash_attention, flash_attention_backward
from rl_backends_hf.transformers_internals import replace_attention
from rl_core.data.shared_prefix import PrefixGroup, prefix_groups
from rl_core.errors import DataError, NotSupportedError

CPU_SDPA: Final = "rlcore_cpu_sdpa"
"""Name of the attention function in Transformers' registry."""

SHORT: Final = 16384
"""Row length times head width up to which the backward pass in bfloat16 is replaced by one in float32. With AMX, forward and
backward together take 0.32 of the time at 64 tokens with heads of width 64, 0.40 at 128, 0.76 at 256 and 0.96 at 1024."""

_PLAIN: Final = frozenset(
    {"scaling", "dropout", "is_causal", "use_cache", "output_attentions", "position_ids", "past_key_values"}
)
"""Keyword arguments of attention that do not change its result here, or that are supported."""


def cpu_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared_prefix: SharedPrefixBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the signature that Transformers expects; with `shared_prefix`, rows share their prefix.

    Args:
        module: the attention layer.
        query: [B, query heads, N, D]; B is 1 with `shared_prefix`.
        key: [B, key heads, N, D].
        value: [B, key heads, N, D].
        attention_mask: as Transformers creates it; ignored with `shared_prefix`.
        shared_prefix: layout of the N tokens.
        **kwargs: as Transformers passes them; `scaling` is the factor of the scores.

    Returns:
        [B, N, query heads, D].

    Raises:
        NotSupportedError: for attention with a soft cap or sinks; with `shared_prefix` also with a window, a bias or dropout.
    """
    refuse_ignored(module, kwargs)
    if shared_prefix is None:
        if attention_mask is None and _has_short_rows(query, key, value) and is_plain(module, kwargs):
            short: torch.Tensor = _Float32Backward.apply(  # type: ignore[no-untyped-call]
                query, key, value, kwargs.get("scaling")
            )
            return short.transpose(1, 2).contiguous(), None
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    require_plain(module, kwargs)
    merged: torch.Tensor = _SharedPrefixAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, shared_prefix.segments, kwargs.get("scaling")
    )
    return merged.transpose(1, 2), None


# Compiled code would be compiled again for each layout of rows.
ALL_ATTENTION_FUNCTIONS.register(CPU_SDPA, torch.compiler.disable(cpu_sdpa))
ALL_MASK_ATTENTION_FUNCTIONS.register(CPU_SDPA, sdpa_mask)


def use_cpu_sdpa(model: PreTrainedModel) -> bool:
    """Use `cpu_sdpa` instead of SDPA in `model`, if it is on a CPU and allows it; returns whether it is used."""
    if model.device.type != "cpu" or flash_attention is None or flash_attention_backward is None:
        return False
    return replace_attention(model, CPU_SDPA)


def refuse_ignored(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a soft cap and sinks, which SDPA ignores.

    Raises:
        NotSupportedError: there is one.
    """
    if ignored := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
        raise NotSupportedError(
            f"{type(module).__name__} passes `{ignored[0]}`, which SDPA ignores. Set `hf_cfg.attn_implementation: eager`.",
            key="hf_cfg.attn_implementation",
        )


def is_plain(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the attention is causal, without a window, soft cap, bias, sinks or dropout."""
    other = [name for name, value in kwargs.items() if name not in _PLAIN and value is not None]
    causal = kwargs.get("is_causal")
    return not other and not kwargs.get("dropout") and bool(getattr(module, "is_causal", True) if causal is None else causal)


def require_plain(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Raise a NotSupportedError unless attention is plain, see `is_plain`."""
    if not is_plain(module, kwargs):
        passed = ", ".join(sorted(name for name, value in kwargs.items() if value is not None))
        raise NotSupportedError(f"{type(module).__name__} is not plain causal attention (it passes {passed})")


def _has_short_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether rows in bfloat16 attend to themselves and have a gradient that is faster to compute in float32."""
    length, width = query.shape[2:]
    is_supported = key.shape[2] == length and value.shape[3] == width and torch.is_grad_enabled() and query.requires_grad
    return is_supported and query.dtype == torch.bfloat16 and query.device.type == "cpu" and length * width <= SHORT


class _Float32Backward(torch.autograd.Function):
    """Causal attention with the forward pass of SDPA, and a backward pass in float32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        output, lse = flash_attention(query, key, value, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale = scale
        result: torch.Tensor = output
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        gradients = flash_attention_backward(*(each.float() for each in (grad, *tensors)), lse, 0.0, True, scale=ctx.scale)
        return *(each.to(grad.dtype) for each in gradients), None


class _SharedPrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[Segment, ...],
        scale: float | None,
    ) -> torch.Tensor:
        dtype = query.dtype
        # Merging in bfloat16 would round twice, and the kernel's backward pass is slow in bfloat16.
        q, k, v = (_computed(each) for each in (query, key, value))
        batch, heads, tokens, width = q.shape
        output = q.new_empty(batch, tokens, heads, width).transpose(1, 2)
        lse = q.new_empty(batch, heads, tokens)
        for segment in segments:
            _attend(segment, q, k, v, output, lse, scale)
        ctx.save_for_backward(query, key, value, output.to(dtype), lse)
        ctx.segments, ctx.scale = segments, scale
        return output.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        dtype = q.dtype
        q, k, v, output, grad = (_computed(each) for each in (q, k, v, output, grad))
        gradients = tuple(torch.empty_like(each) for each in (q, k, v))
        for segment in ctx.segments:
            _differentiate(segment, grad, q, k, v, output, lse, gradients, ctx.scale)
        return *(each.to(dtype) for each in gradients), None, None


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _attend(
    segment: Segment,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
) -> None:
    """Set `output` [1, heads, N, D] and `lse` [1, heads, N] of the segment's tokens."""
    prefix, later = slice(segment.start, segment.start + segment.prefix), slice(segment.start + segment.prefix, segment.end)
    if segment.prefix:
        output[:, :, prefix], lse[:, :, prefix] = flash_attention(
            q[:, :, prefix], k[:, :, prefix], v[:, :, prefix], 0.0, True, scale=scale
        )
    if later.start == later.stop:
        return
    rows, row_lse = flash_attention(_by_row(q, segment), _by_row(k, segment), _by_row(v, segment), 0.0, True, scale=scale)
    own, own_lse = _by_token(rows, segment), _by_token(row_lse.unsqueeze(-1), segment)
    if segment.prefix:
        prefix_output, prefix_lse = flash_attention(q[:, :, later], k[:, :, prefix], v[:, :, prefix], 0.0, False, scale=scale)
        prefix_lse = prefix_lse.unsqueeze(-1)
        whole = torch.logaddexp(own_lse, prefix_lse)
        own = own * (own_lse - whole).exp() + prefix_output * (prefix_lse - whole).exp()
        own_lse = whole
    output[:, :, later], lse[:, :, later] = own, own_lse.squeeze(-1)


def _differentiate(
    segment: Segment,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
    scale: float | None,
) -> None:
    """Set `gradients` of q, k and v at the segment's tokens."""
    prefix, later = slice(segment.start, segment.start + segment.prefix), slice(segment.start + segment.prefix, segment.end)
    if segment.prefix:
        one = (each[:, :, prefix] for each in (grad, q, k, v, output, lse))
        for total, gradient in zip(gradients, flash_attention_backward(*one, 0.0, True, scale=scale), strict=True):
            total[:, :, prefix] = gradient
    if later.start == later.stop:
        return
    row_grad = _by_row(grad, segment)
    if segment.is_padded:
        # A padded token repeats its row's last one, so its log-sum-exp is finite; without a gradient it has no effect.
        padded = torch.ones(segment.own.numel(), dtype=torch.bool)
        padded[segment.own_tokens] = False
        row_grad = row_grad.masked_fill(padded.view(segment.own.shape[0], 1, -1, 1), 0.0)
    row_lse = _by_row(lse.unsqueeze(-1), segment).squeeze(-1)
    rows = (_by_row(each, segment) for each in (q, k, v, output))
    of_rows = flash_attention_backward(row_grad, *rows, row_lse, 0.0, True, scale=scale)
    for total, gradient in zip(gradients, of_rows, strict=True):
        total[:, :, later] = _by_token(gradient, segment)
    if segment.prefix:
        shares = flash_attention_backward(
            grad[:, :, later],
            q[:, :, later],
            k[:, :, prefix],
            v[:, :, prefix],
            output[:, :, later],
            lse[:, :, later],
            0.0,
            False,
            scale=scale,
        )
        for total, share, where in zip(gradients, shares, (later, prefix, prefix), strict=True):
            total[:, :, where] += share


def _by_row(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[1, heads, N, D] of the segment's own tokens as [R, heads, C, D], which is a view if the rows are equally long."""
    if segment.is_padded:
        picked = tensor[0].index_select(1, segment.own.flatten())
    else:
        picked = tensor[0, :, segment.start + segment.prefix : segment.end]
    by_row: torch.Tensor = picked.unflatten(1, segment.own.shape)
    return by_row.transpose(0, 1)


def _by_token(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[R, heads, C, D] as [1, heads, tokens, D], without padding."""
    flat = tensor.transpose(0, 1).flatten(1, 2)
    return (flat.index_select(1, segment.own_tokens) if segment.is_padded else flat).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one group in a `SharedPrefixBatch`.

    Attributes:
        start: index of the first token of the prefix.
        prefix: number of tokens of the prefix.
        end: index after the last token.
        own: [R, C] int64, index of each token after the prefix of the R rows that have any; rows with fewer than C tokens
            repeat their last.
        own_tokens: [end - start - prefix] int64, index in the flattened `own` of the tokens from start + prefix on.
    """

    start: int
    prefix: int
    end: int
    own: torch.Tensor
    own_tokens: torch.Tensor

    @property
    def is_padded(self) -> bool:
        """Whether the rows have different lengths."""
        return self.own.numel() != self.own_tokens.numel()


@dataclass(frozen=True, kw_only=True)
class SharedPrefixBatch:
    """B rows as one sequence of N tokens.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, position of each token in its row.
        token_index: [B, T] int64, index in the sequence of each token of each row; -1 on padding.
        segments: one for each prompt, in order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_index: torch.Tensor
    segments: tuple[Segment, ...]


def share_prefixes(input_ids: torch.Tensor, lengths: torch.Tensor, prompt_ids: torch.Tensor) -> SharedPrefixBatch:
    """Lay out the rows of a microbatch; arguments as `rl_core.data.shared_prefix.prefix_groups`.

    Raises:
        DataError: a length exceeds T.
    """
    if bool((lengths > input_ids.shape[1]).any()):
        raise DataError(f"`input_lengths` is {lengths.tolist()}, but `input_ids` has {input_ids.shape[1]} columns")
    token_index = torch.full(input_ids.shape, -1, dtype=torch.int64)
    segments = []
    end = 0
    for group in prefix_groups(input_ids, lengths, prompt_ids):
        segments.append(_lay_out(group, lengths, token_index, start=end))
        end = segments[-1].end
    # Rows that share a token write the same values.
    rows, columns = (token_index >= 0).nonzero(as_tuple=True)
    index = token_index[rows, columns]
    tokens, positions = (torch.zeros(end, dtype=torch.int64) for _ in range(2))
    tokens[index] = input_ids[rows, columns]
    positions[index] = columns
    return SharedPrefixBatch(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), token_index=token_index, segments=tuple(segments)
    )


def _lay_out(group: PrefixGroup, lengths: torch.Tensor, token_index: torch.Tensor, *, start: int) -> Segment:
    """The segment of one group; sets `token_index` [B, T] of its rows."""
    prefix, end = group.prefix, start + group.prefix
    token_index[group.rows, :prefix] = torch.arange(start, end)
    suffixes = []
    for row in group.rows:
        more = int(lengths[row]) - prefix
        if more:
            suffixes.append(torch.arange(end, end + more))
            token_index[row, prefix : prefix + more] = suffixes[-1]
            end += more
    longest = max((len(tokens) for tokens in suffixes), default=0)
    padded = [torch.nn.functional.pad(tokens, (0, longest - len(tokens)), value=int(tokens[-1])) for tokens in suffixes]
    places = [torch.arange(len(tokens)) + number * longest for number, tokens in enumerate(suffixes)]
    empty = torch.zeros(0, dtype=torch.int64)
    return Segment(
        start=start,
        prefix=prefix,
        end=end,
        own=torch.stack(padded) if suffixes else empty.view(0, 0),
        own_tokens=torch.cat(places) if suffixes else empty,
    )
