"""Converts microbatches to model inputs in one of three forms; `padded_input` is in rl-backends-base.

*Padded* [b, T], trimmed to its longest row; *packed* [1, N], rows end to end with positions that restart; or *shared* [1, N]:
rows of a prompt follow their common prefix, which comes once.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_backends_base import ScoringInput, scored_tokens
from rl_backends_hf.cpu_attention import share_prefixes
from rl_backends_hf.varlen_attention import VARLEN, Borders, SharedRows
from rl_core.data.batched_data_dict import to_device
from rl_core.data.shared_prefix import pack_rows


def packed_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    pad_multiple: int = 1,
    variable_length_kernel: str | None = None,
) -> ScoringInput:
    """Rows packed end to end into one.

    Transformers separates them only if `position_ids` restart, *no* attention mask is given and the cache is off; otherwise,
    rows silently attend to each other.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        device: device of the model.
        shift: see `scored_tokens`.
        mask: [b, T], tokens to score; all by default.
        positions: [3, b, T], coordinates of the tokens, for models that have them.
        pad_multiple: each row is padded to a multiple of this many tokens.
        variable_length_kernel: attention function that takes sequence boundaries (`VARLEN` or flash attention), if any.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    packed = pack_rows({"input_ids": input_ids, "input_lengths": lengths}, pad_multiple=pad_multiple)
    laid_out = packed.position_ids
    if positions is not None:
        own = positions[:, packed.row_index.clamp(min=0), laid_out[0].clamp(max=input_ids.shape[1] - 1)]
        laid_out = torch.cat([laid_out.unsqueeze(0), own.unsqueeze(1)])
    attention: dict[str, Any] = {"position_ids": to_device(laid_out, device)}
    if variable_length_kernel == VARLEN:
        lengths_in_pack = packed.cu_seqlens.diff().tolist()
        attention |= {
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "packed_rows": Borders.of(lengths_in_pack, lengths_in_pack, device),
        }
    elif variable_length_kernel is not None:
        borders = to_device(packed.cu_seqlens, device)
        attention |= {
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }
    return ScoringInput(
        input_ids=to_device(packed.input_ids, device),
        hidden_index=to_device(packed.cu_seqlens.to(torch.int64)[rows] + columns - shift, device),
        targets=to_device(input_ids[rows, columns], device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        attention=attention,
    )


def shared_input(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    prompt_ids: torch.Tensor,
    *,
    device: torch.device,
    shift: int,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> ScoringInput:
    """Rows with the same prompt id as one sequence, with their common prefix once; see `share_prefixes`.

    Args:
        input_ids: [b, T] int64, right-padded.
        lengths: [b] int64, tokens of each row.
        prompt_ids: [b] int64.
        device: device of the model.
        shift: see `scored_tokens`.
        mask: [b, T], tokens to score; all by default.
        positions: as in `packed_input`.
    """
    rows, columns = scored_tokens(input_ids, lengths, mask, shift=shift)
    shared = share_prefixes(input_ids, lengths, prompt_ids)
    laid_out = shared.position_ids
    if positions is not None:
        present = shared.token_index >= 0
        laid_out = torch.zeros(3, *laid_out.shape, dtype=torch.int64)
        laid_out[:, 0, shared.token_index[present]] = positions[:, present]
    hidden, targets, repeat = shared.token_index[rows, columns - shift], input_ids[rows, columns], None
    if mask is None:
        # Tokens of a prefix are the same in all of its rows, so the head is applied to them once.
        first, repeat = _distinct(torch.stack([hidden, targets], dim=1))
        hidden, targets = hidden[first], targets[first]
    return ScoringInput(
        input_ids=to_device(shared.input_ids, device),
        hidden_index=to_device(hidden, device),
        targets=to_device(targets, device),
        output_index=to_device(rows * input_ids.shape[1] + columns, device),
        shape=(input_ids.shape[0], input_ids.shape[1]),
        # Transformers passes on a mask with four axes as it is, and would create one with N * N entries otherwise.
        attention={
            "position_ids": to_device(laid_out, device),
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "shared_prefix": shared if device.type == "cpu" else SharedRows.of(shared, device),
        },
        repeat=None if repeat is None else to_device(repeat, device),
    )


def _distinct(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first of each distinct row of `pairs` [M, 2], and [M] which of these each row equals."""
    distinct, inverse = torch.unique(pairs, dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(pairs), dtype=torch.int64)
    return first.scatter_reduce(0, inverse, torch.arange(len(pairs)), "amin"), inverse
