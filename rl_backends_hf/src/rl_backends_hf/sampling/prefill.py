"""Computes prompts, or the new tokens of prompts with keys and values of an earlier turn, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from rl_backends_hf.sampling.rows import PromptGroup
from rl_backends_hf.sampling.session_cache import CachedPrefix
from rl_backends_hf.transformers_internals import cache_keyword
from rl_core.data.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Groups of rows that are computed together; either all of them have a prefix, or none has.

    Attributes:
        groups: one row of the forward pass each.
        prefixes: keys and values of each group's first tokens.
    """

    groups: list[PromptGroup]
    prefixes: list[CachedPrefix]

    @property
    def past(self) -> list[int]:
        """Number of tokens at the start of each group's prompt whose keys and values are reused, not computed."""
        return [len(prefix.tokens) for prefix in self.prefixes] or [0] * len(self.groups)


def prefill(model: PreTrainedModel, plan: PrefillPlan) -> tuple[torch.Tensor, DynamicCache]:
    """Logits [N, V] of the token after each group's prompt, and keys and values.

    The cache has left-padded columns of the prefixes, if there are any, and then left-padded columns of new tokens.
    """
    # Computed on the host, which knows all of it, and copied to the device at the end.
    device = model.get_input_embeddings().weight.device
    past = torch.tensor(plan.past).unsqueeze(1)
    new = [group.prompt[kept:] for group, kept in zip(plan.groups, plan.past, strict=True)]
    past_width, width = max(plan.past), max(map(len, new))
    padding = [width - len(tokens) for tokens in new]
    ids = torch.tensor([[0] * pad + tokens for pad, tokens in zip(padding, new, strict=True)])
    is_new = torch.arange(width) >= torch.tensor(padding).unsqueeze(1)
    is_past = torch.arange(past_width) >= past_width - past
    mask = torch.cat([is_past, is_new], dim=1)
    cache = DynamicCache()
    for number, layer in enumerate(zip(*(prefix.layers for prefix in plan.prefixes), strict=True)):
        keys, values = zip(*layer, strict=True)
        cache.update(_left_padded(keys, past_width), _left_padded(values, past_width), number)
    logits = model(
        input_ids=to_device(ids, device),
        attention_mask=None if bool(mask.all()) else to_device(mask, device),
        position_ids=to_device((is_new.cumsum(dim=1) - 1).clamp_(min=0) + past, device),
        use_cache=True,
        **{cache_keyword(model): cache},
        # A tensor, because the model would use a number for a slice, which is not contiguous: for such an input, torch's linear
        # layers on CPUs copy their weight, here that of the LM head, once per row.
        logits_to_keep=to_device(torch.tensor([width - 1]), device),
    ).logits[:, -1]
    return logits, cache


def _left_padded(tensors: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """[N, heads, width, head_dim] from N tensors [heads, length, head_dim]."""
    first = tensors[0]
    padded = first.new_zeros((len(tensors), first.shape[0], width, first.shape[2]))
    for row, tensor in enumerate(tensors):
        padded[row, :, width - tensor.shape[1] :] = tensor
    return padded
