"""Prompts that several rows share while they are decoded: stored once, and read once per token for all of these rows.

Without sharing, each sample of a prompt has its own copy of the prompt's keys and values, and reads all of it for every token.
Here, the scores of all rows of a prompt with it are one product of matrices, and those of each row with its own tokens another.
In float32, they are kept and normalized together. In bfloat16, the flash kernel computes each of the two in float32, and they
are merged by their log-sum-exp, as in `cpu_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PreTrainedModel

from rl_backends_hf.torch_internals import flash_attention
from rl_backends_hf.transformers_internals import attention_of, takes_other_attention

MIN_TOKENS: Final = {torch.float32: 32, torch.bfloat16: 128}
"""Minimum length of a prompt that is shared: for shorter ones, the second product costs as much as it saves."""


def prefers_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_by_products` is faster than SDPA; it is less exact in bfloat16, to which products round the scores."""
    return device.type == "cpu" and dtype == torch.float32


@dataclass(kw_only=True)
class PromptSharing:
    """Whether the rows of a prompt share it; only on CPUs, and only with plain attention in all layers.

    Attributes:
        is_supported: becomes False if a layer does not attend to shared prompts.
        dtype: of the model.
    """

    is_supported: bool
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: PreTrainedModel, *, window: int | None) -> PromptSharing:
        """Whether `model` can share prompts, as far as its class and config show it; `window` is its sliding window."""
        parameters = inspect.signature(model.forward).parameters.values()
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        own_function = attention_of(model) != "eager" and takes_other_attention(model) and flash_attention is not None
        is_supported = passes_on and own_function and window is None and model.device.type == "cpu"
        return cls(is_supported=is_supported and model.dtype in MIN_TOKENS, dtype=model.dtype)

    def shared_tokens(self, prompt: Sequence[int], rows: int) -> int:
        """How many tokens of a prompt its `rows` rows share: all or none."""
        return len(prompt) if self.is_supported and rows > 1 and len(prompt) >= MIN_TOKENS[self.dtype] else 0


@dataclass(kw_only=True)
class PromptTable:
    """The shared prompts of the rows in slots 0..N-1.

    Attributes:
        lengths: tokens of each prompt.
        of_slot: prompt of each slot; -1 if the row does not share its prompt.
    """

    lengths: list[int] = field(default_factory=list)
    of_slot: list[int] = field(default_factory=list)
    _lookup: _Lookup | None = None
    _calls: int = 0

    def start(self, slot: int) -> int:
        """Number of shared tokens of the row in `slot`; its own tokens begin after them."""
        return self.lengths[self.of_slot[slot]] if self.of_slot[slot] >= 0 else 0

    def starts(self) -> list[int]:
        """`start` of each slot."""
        return [self.start(slot) for slot in range(len(self.of_slot))]

    def add(self, prompt_of_row: Sequence[int], lengths: Sequence[int]) -> None:
        """Add rows and their prompts; `prompt_of_row` counts from the first new prompt, or is -1."""
        first = len(self.lengths)
        self.lengths.extend(lengths)
        self.of_slot.extend(prompt + first if prompt >= 0 else -1 for prompt in prompt_of_row)
        self._lookup = None

    def keep(self, slots: Sequence[int]) -> list[int]:
        """Keep only rows in `slots`, in this order; returns the prompts that are still used, in their new order."""
        indices = [self.of_slot[slot] for slot in slots]
        used = sorted({prompt for prompt in indices if prompt >= 0})
        number = {prompt: index for index, prompt in enumerate(used)}
        self.of_slot = [number.get(prompt, -1) for prompt in indices]
        self.lengths = [self.lengths[prompt] for prompt in used]
        self._lookup = None
        return used

    def calls_of_pass(self) -> int:
        """Number of calls of `merge` since the previous call of this method."""
        calls, self._calls = self._calls, 0
        return calls

    def attend(
        self,
        query: torch.Tensor,
        prompts: tuple[torch.Tensor, torch.Tensor],
        own: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of each row to its prompt and its own tokens.

        Args:
            query: [N, key heads, G, D], the G query heads of each key head.
            prompts: keys and values [prompts, key heads, P, D], padded on the right.
            own: keys and values [N, key heads, K, D] of each row's own tokens.
            mask: [N, 1, 1, K], added to the scores of own tokens.
            scale: factor of the scores.

        Returns:
            [N, key heads, G, D] in the dtype of `query`.
        """
        self._calls += 1
        if self._lookup is None:
            self._lookup = _Lookup.of(self.of_slot, self.lengths, columns=prompts[0].shape[2], dtype=query.dtype)
        lookup = self._lookup
        if prefers_products(query.device, query.dtype):
            return attend_by_products(query, *own, mask, scale=scale, shared=(lookup, *prompts))
        own_output, own_lse = flash_attention(query, *own, 0.0, False, attn_mask=mask, scale=scale)
        prompt_output, prompt_lse = lookup.attend(query, *prompts, scale=scale)
        share = torch.sigmoid(prompt_lse - own_lse).unsqueeze(-1) * lookup.has_prompt
        return torch.lerp(own_output.float(), prompt_output.float(), share).to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """Indices between rows and prompts.

    Attributes:
        rows: [prompts * R] int64, the rows of each prompt, padded with row 0.
        places: [N] int64, index of each row in `rows`.
        count: number of prompts.
        mask: [prompts, 1, 1, P], added to the scores of each prompt's tokens; None if all prompts have P tokens.
        mask_of_row: [N, 1, 1, P], added to the scores of each row.
        has_prompt: [N, 1, 1, 1], 0 for rows without a shared prompt, and 1 for others.
    """

    rows: torch.Tensor
    places: torch.Tensor
    count: int
    mask: torch.Tensor | None
    mask_of_row: torch.Tensor
    has_prompt: torch.Tensor

    @classmethod
    def of(cls, of_slot: Sequence[int], lengths: Sequence[int], *, columns: int, dtype: torch.dtype) -> _Lookup:
        members: list[list[int]] = [[] for _ in lengths]
        for slot, prompt in enumerate(of_slot):
            if prompt >= 0:
                members[prompt].append(slot)
        most = max(map(len, members))
        places = [0] * len(of_slot)
        for prompt, slots in enumerate(members):
            for place, slot in enumerate(slots):
                places[slot] = prompt * most + place
        prompt_of_row = torch.tensor(of_slot)
        has_prompt = (prompt_of_row >= 0).view(-1, 1, 1, 1)
        padding = (torch.arange(columns) >= torch.tensor(lengths).unsqueeze(1))[:, None, None, :]
        hidden = padding[prompt_of_row] | ~has_prompt
        return cls(
            rows=torch.tensor([slot for slots in members for slot in slots + [0] * (most - len(slots))]),
            places=torch.tensor(places),
            count=len(lengths),
            mask=torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf")) if padding.any() else None,
            mask_of_row=torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")),
            has_prompt=has_prompt.float(),
        )

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [N, key heads, G, D] of each row to its prompt, and the log-sum-exp [N, key heads, G] of its scores."""
        queries = self.by_prompt(query).unflatten(0, (self.count, -1))
        output, lse = flash_attention(queries, keys, values, 0.0, False, attn_mask=self.mask, scale=scale)
        group = query.shape[2]
        return self.by_row(output, group), self.by_row(lse.unsqueeze(-1), group).squeeze(-1)

    def by_prompt(self, of_rows: torch.Tensor) -> torch.Tensor:
        """[N, heads, G, D] as [prompts * heads, R * G, D]."""
        heads, group, width = of_rows.shape[1:]
        rows = of_rows.index_select(0, self.rows).view(self.count, -1, heads, group, width)
        return rows.transpose(1, 2).reshape(self.count * heads, -1, width)

    def by_row(self, of_prompts: torch.Tensor, group: int) -> torch.Tensor:
        """[prompts, heads, R * G, D] as [N, heads, G, D]."""
        rows: torch.Tensor = of_prompts.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)
        return rows.index_select(0, self.places)


def attend_by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None,
    shared: tuple[_Lookup, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of one token per row, of which the scores exist as a whole; on CPUs in float32 faster than SDPA's kernel.

    Args:
        query: [N, key heads, G, D].
        keys: [N, key heads, K, D].
        values: [N, key heads, K, D'].
        mask: [N, 1, 1, K], added to the scores.
        scale: factor of the scores; D^-1/2 by default.
        shared: prompts that rows share, and their keys and values.

    Returns:
        [N, key heads, G, D'].
    """
    rows, heads, group, width = query.shape
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(rows, heads, group, -1)
    if shared is not None:
        lookup, prompt_keys, prompt_values = shared
        of_prompts = torch.bmm(lookup.by_prompt(query), prompt_keys.flatten(0, 1).transpose(1, 2))
        scores = torch.cat([lookup.by_row(of_prompts.unflatten(0, (-1, heads)), group), scores], dim=-1)
        mask = torch.cat([lookup.mask_of_row, mask], dim=-1)
    probabilities = torch.add(mask, scores, alpha=width**-0.5 if scale is None else scale).softmax(dim=-1)
    own = probabilities[..., -keys.shape[2] :].flatten(0, 1)
    if shared is None:
        return torch.bmm(own, values.flatten(0, 1)).view(rows, heads, group, -1)
    first = torch.bmm(lookup.by_prompt(probabilities[..., : -keys.shape[2]]), prompt_values.flatten(0, 1))
    of_rows = lookup.by_row(first.unflatten(0, (-1, heads)), group) * lookup.has_prompt
    return torch.baddbmm(of_rows.flatten(0, 1), own, values.flatten(0, 1)).view(rows, heads, group, -1)
