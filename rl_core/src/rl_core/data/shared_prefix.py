"""Rows that share a prompt, and the number of tokens to compute if their common prefix is computed once.

Rows belong together if they have the same `prompt_id`. The length of their common prefix is computed from their tokens, so it
may be shorter than the prompt (a truncated row) or longer (equal first answer tokens).

Known as prefix sharing, https://arxiv.org/abs/2506.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
