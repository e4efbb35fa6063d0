"""Prompts that several rows share while they are decoded: stored once, and read once per token for all of these rows.

Without sharing, each sample of a prompt has its own copy of the prompt's keys and values, and reads all of it for every token.
Here, the rows of a prompt attend to it in one call, and each row attends to its own tokens in another. The two are merged by
their log-sum-exp, as in `cpu_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import PreTrainedModel

MIN_TOKENS: Final = 128
"""Minimum length of a prompt that is shared: for shorter ones, the second call costs as much as it saves."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(kw_only=True)
class PromptSharing:
    """Whether the rows of a prompt share it; only on CPUs, and only with plain attention in all layers.

    Attributes:
        is_supported: becomes False if a layer does not attend to shared prompts.
    """

    is_supported: bool

    @classmethod
    def of(cls, model: PreTrainedModel, *, window: int | None) -> PromptSharing:
        """Whether `model` can share prompts, as far as its class and config show it; `window` is its sliding window."""
        parameters = inspect.signature(model.forward).parameters.values()
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        own_function = model.config._attn_implementation != "eager" and model._can_set_attn_implementation()
        return cls(is_supported=passes_on and own_function and window is None and model.device.type == "cpu")

    def shared_tokens(self, prompt: Sequence[int], rows: int) -> int:
        """How many tokens of a prompt its `rows` rows share: all or none."""
        return len(prompt) if self.is_supported and rows > 1 and len(prompt) >= MIN_TOKENS else 0


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

    def merge(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: torch.Tensor,
        own_lse: torch.Tensor,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of each row to its prompt and its own tokens.

        Args:
            query: [N, key heads, G, D], the G query heads of each key head.
            keys: [prompts, key heads, P, D], padded on the right.
            values: [prompts, key heads, P, D].
            own: [N, key heads, G, D], attention to the row's own tokens.
            own_lse: [N, key heads, G] float32, log-sum-exp of its scores.
            scale: factor of the scores.

        Returns:
            [N, key heads, G, D] in the dtype of `query`.
        """
        self._calls += 1
        if self._lookup is None:
            self._lookup = _Lookup.of(self.of_slot, self.lengths, columns=keys.shape[2], dtype=query.dtype)
        prompt_output, prompt_lse = self._lookup.attend(query, keys, values, scale=scale)
        share = torch.sigmoid(prompt_lse - own_lse).unsqueeze(-1)
        if self._lookup.has_prompt is not None:
            share = share * self._lookup.has_prompt
        return torch.lerp(own.float(), prompt_output.float(), share).to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """Indices between rows and prompts.

    Attributes:
        rows: [prompts * R] int64, the rows of each prompt, padded with row 0.
        places: [N] int64, index of each row in `rows`.
        mask: [prompts, 1, 1, P], added to the scores; None if all prompts have P tokens.
        has_prompt: [N, 1, 1, 1], 0 for rows without a shared prompt; None if all have one.
    """

    rows: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None
    has_prompt: torch.Tensor | None

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
        padding = (torch.arange(columns) >= torch.tensor(lengths).unsqueeze(1))[:, None, None, :]
        shares = torch.tensor(of_slot) >= 0
        return cls(
            rows=torch.tensor([slot for slots in members for slot in slots + [0] * (most - len(slots))]),
            places=torch.tensor(places),
            mask=torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf")) if padding.any() else None,
            has_prompt=None if shares.all() else shares.view(-1, 1, 1, 1).float(),
        )

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [N, key heads, G, D] of each row to its prompt, and the log-sum-exp [N, key heads, G] of its scores."""
        heads, group, width = query.shape[1:]
        prompts = len(keys)
        queries = query.index_select(0, self.rows).view(prompts, -1, heads, group, width).transpose(1, 2)
        output, lse = _flash(
            queries.reshape(prompts, heads, -1, width), keys, values, 0.0, False, attn_mask=self.mask, scale=scale
        )
        return self._by_row(output, query.shape), self._by_row(lse.unsqueeze(-1), query.shape).squeeze(-1)

    def _by_row(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        heads, group = shape[1:3]
        by_row = values.reshape(len(values), heads, -1, group, values.shape[-1]).transpose(1, 2).flatten(0, 1)
        return by_row.index_select(0, self.places)


def attend_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [N, key heads, G, D] of each row to its own tokens, and the log-sum-exp [N, key heads, G] of its scores.

    Args:
        query: [N, key heads, G, D].
        keys: [N, key heads, K, D].
        values: [N, key heads, K, D].
        mask: [N, 1, 1, K], added to the scores.
        scale: factor of the scores.
    """
    result: tuple[Any, Any] = _flash(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    return result
