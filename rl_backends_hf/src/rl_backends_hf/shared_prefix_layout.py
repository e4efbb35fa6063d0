"""Rows that share a prompt as one sequence: the common prefix once, followed by the rest of each row.

A token of a row attends to the prefix and to the row's own tokens before it, and its position is that in its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_core.data.shared_prefix import PrefixGroup, prefix_groups
from rl_core.errors import DataError


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
