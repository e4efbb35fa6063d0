"""Layouts of rows: padded, grouped by a common prefix that is computed once, or packed into one long row.

Rows belong together if they have the same `prompt_id`. The length of their common prefix is computed from their tokens, so it
may be shorter than the prompt (a truncated row) or longer (equal first answer tokens). Known as prefix sharing,
https://arxiv.org/abs/2506.05433.

Attention kernels keep packed rows apart by position ids that restart at 0 with each row, and by `cu_seqlens`, the offsets at
which rows begin. Attention across these boundaries contaminates one row with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from rl_core.errors import DataError

MAX_SHARE = 0.9
"""Sharing is worthwhile if it leaves at most this fraction of the tokens to compute. It costs additional calls of the attention
kernel for each prompt, which outweigh smaller savings."""


@dataclass(frozen=True, kw_only=True)
class PrefixGroup:
    """Rows with the same prompt.

    Attributes:
        rows: their numbers in the batch, ascending.
        prefix: length in tokens of their longest common prefix; for a single row, its whole length.
    """

    rows: list[int]
    prefix: int


def prefix_groups(input_ids: torch.Tensor, lengths: torch.Tensor, prompt_ids: torch.Tensor) -> list[PrefixGroup]:
    """The rows of each prompt, in the order of their first rows.

    Takes `input_ids` [B, T] int64, right-padded, `lengths` [B] int64, the tokens of each row, and `prompt_ids` [B] int64.
    """
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids.tolist()):
        members.setdefault(prompt, []).append(row)
    return [PrefixGroup(rows=rows, prefix=common_prefix(input_ids[rows], lengths[rows])) for rows in members.values()]


def common_prefix(input_ids: torch.Tensor, lengths: torch.Tensor) -> int:
    """Number of tokens that all rows begin with; for a single row, its length. Arguments as `prefix_groups`."""
    shortest = int(lengths.min())
    is_common = (input_ids[1:, :shortest] == input_ids[0, :shortest]).all(dim=0)
    return int(is_common.int().cumprod(dim=0).sum())


def computed_tokens(groups: Sequence[PrefixGroup], lengths: Sequence[int]) -> int:
    """Number of tokens to compute if the rows of each group share their prefix; `lengths` are those of the whole batch."""
    return sum(group.prefix + sum(lengths[row] - group.prefix for row in group.rows) for group in groups)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """R rows in one packed row of N tokens.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64; 0, 1, 2, ... in each row, including its padding.
        cu_seqlens: [R + 1] int32; row r spans cu_seqlens[r] to cu_seqlens[r + 1], including its padding.
        max_seqlen: Length of the longest row, including its padding.
        row_index: [N] int64; row of each token, -1 on padding.
        lengths: [R] int64; tokens of each row, without padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    row_index: torch.Tensor
    lengths: torch.Tensor


def pack_rows(data: Mapping[str, Any], *, pad_multiple: int = 1) -> PackedBatch:
    """Pack the rows of a microbatch, `input_ids` [R, T] and `input_lengths` [R], each padded to a multiple of `pad_multiple`.

    Raises:
        DataError: A length is negative or exceeds T.
    """
    tokens, lengths = data["input_ids"], data["input_lengths"].to(torch.int64)
    if bool((lengths < 0).any()) or bool((lengths > tokens.shape[1]).any()):
        raise DataError(f"'input_lengths' is {lengths.tolist()}, but 'input_ids' has {tokens.shape[1]} tokens")
    padded = (lengths + pad_multiple - 1) // pad_multiple * pad_multiple
    ends = padded.cumsum(0)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), padded.to(tokens.device))
    position = torch.arange(len(row), device=tokens.device) - (ends - padded).to(tokens.device)[row]
    is_token = position < lengths.to(tokens.device)[row]
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=tokens.device)
    cu_seqlens[1:] = ends
    picked = tokens[row, torch.where(is_token, position, 0)]
    return PackedBatch(
        input_ids=torch.where(is_token, picked, 0).unsqueeze(0),
        position_ids=position.unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(padded.max()) if len(padded) else 0,
        row_index=torch.where(is_token, row, -1),
        lengths=lengths,
    )


def right_padded(part: torch.Tensor, width: int, *, pad_value: float = 0.0) -> torch.Tensor:
    """A tensor [B, T, ...], padded on the right along axis 1 to [B, `width`, ...]."""
    return pad(part, (*(0, 0) * (part.ndim - 2), 0, width - part.shape[1]), value=pad_value)


def cat_right_padded(parts: Sequence[torch.Tensor], *, pad_value: float) -> torch.Tensor:
    """Concatenate tensors [B, T, ...], padded on the right along axis 1, or [B]: [sum of B, largest T, ...]."""
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([right_padded(part, width, pad_value=pad_value) for part in parts])
