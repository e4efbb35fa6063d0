"""A KV cache of rows being decoded, updated in place and without gaps.

Each row has a slot; column t of a slot holds the token at position t, or at position P + t if the row shares a prompt of P
tokens with other rows. Rows of different lengths therefore need no left padding, and new rows can join at any time. Slots
0..N-1 are in use: a row from the end moves into the slot of a finished row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rl_backends_hf.sampling.shared_prompts import PromptTable
from rl_core.data.batched_data_dict import to_device
from rl_core.errors import NotSupportedError


class SlotLayer(CacheLayerMixin):
    """Keys and values [slots, heads, columns, head_dim] of one layer; returns views of the slots and columns in use.

    Attributes:
        prompts: keys and values [prompts, heads, P, head_dim] of shared prompts, padded on the right.
    """

    is_sliding = False

    def __init__(self, slots: SlotTable) -> None:
        super().__init__()
        self._slots = slots
        self.prompts: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (self._slots.capacity, key_states.shape[1], self._slots.columns)
        # Zeros, because a masked column has no effect only if its values are finite.
        self.keys = torch.zeros((*shape, key_states.shape[3]), dtype=self.dtype, device=self.device)
        self.values = torch.zeros((*shape, value_states.shape[3]), dtype=value_states.dtype, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row ([N, heads, 1, head_dim]) at its position; return all columns up to the longest row."""
        used, width = self._slots.used, self._slots.width
        flat_index = self._slots.flat_index(key_states.shape[1])
        for own, new in ((self.keys, key_states), (self.values, value_states)):
            own.view(-1, new.shape[3]).index_copy_(0, flat_index, new.reshape(-1, new.shape[3]))
        return self.keys[:used, :, :width], self.values[:used, :, :width]

    def holds(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are what `update` returned, and not computed from it, as multi-head latent attention does."""
        return keys.data_ptr() == self.keys.data_ptr() and values.data_ptr() == self.values.data_ptr()

    def load(self, other: CacheLayerMixin, *, runs: Sequence[PrefillRun], past_width: int) -> None:
        """Copy prompts from a prefill: `past_width` left-padded columns computed before it, then left-padded new ones."""
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        for run in runs:
            rows = slice(run.first_slot, run.first_slot + len(run.sources))
            for own, prefilled in ((self.keys, other.keys), (self.values, other.values)):
                own[rows, :, : run.past] = prefilled[run.sources, :, past_width - run.past : past_width]
                new = prefilled.shape[2] - (run.length - run.past)
                own[rows, :, run.past : run.length] = prefilled[run.sources, :, new:]

    def load_prompts(self, other: CacheLayerMixin, *, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy prompts that rows share from left-padded rows of a prefill."""
        pairs = zip(self.prompts or (None, None), (other.keys, other.values), strict=True)
        self.prompts = _pair(_with_prompts(old, new, sources, lengths) for old, new in pairs)

    def keep_prompts(self, kept: Sequence[int]) -> None:
        """Drop all shared prompts except these."""
        if self.prompts is not None and len(kept) < len(self.prompts[0]):
            self.prompts = _pair(prompts[list(kept)] for prompts in self.prompts) if kept else None

    def move(self, sources: torch.Tensor, targets: torch.Tensor, *, width: int) -> None:
        """Copy whole slots, up to column `width`."""
        for own in (self.keys, self.values):
            own[targets, :, :width] = own[sources, :, :width]

    def grow(self, *, capacity: int, columns: int, used: int, width: int) -> None:
        """Allocate more slots or columns."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((capacity, old.shape[1], columns, old.shape[3]))
            new[:used, :, :width] = old[:used, :, :width]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0

    def get_seq_length(self) -> int:
        return self._slots.width - 1

    def get_max_length(self) -> int:
        return self._slots.columns


class PrefillRun:
    """Consecutive slots for rows of equal prompt length.

    Attributes:
        first_slot: the first slot.
        sources: [slots] int64, row of the prefill for each slot; a list would be copied to a GPU for each layer.
        length: tokens of each prompt.
        past: number of them that were computed before the prefill.
    """

    def __init__(self, *, first_slot: int, sources: torch.Tensor, length: int, past: int) -> None:
        self.first_slot, self.sources, self.length, self.past = first_slot, sources, length, past


class SlotTable:
    """Slots and columns in use; shared by the layers of one cache.

    Attributes:
        capacity: number of slots.
        used: number of slots in use, the first ones.
        columns: number of columns.
        width: number of columns in use: the largest number of tokens of a row, without its shared prompt.
        positions: [used] int64, position of each row's latest token.
        prompts: the shared prompts.
    """

    def __init__(self, *, capacity: int, columns: int, device: torch.device) -> None:
        self.capacity, self.columns = capacity, columns
        self.used = self.width = 0
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.prompts = PromptTable()
        self._starts = self.positions
        self._flat_indices: dict[int, torch.Tensor] = {}

    def flat_index(self, heads: int) -> torch.Tensor:
        """[used * heads] int64, index of each row's latest token in a layer viewed as [slots * heads * columns, head_dim].

        One flat index for all layers: writing with it is twenty times as fast as with three indices.
        """
        if heads not in self._flat_indices:
            device = self.positions.device
            lanes = torch.arange(self.used * heads, device=device) * self.columns
            self._flat_indices[heads] = lanes + self.own_columns().repeat_interleave(heads)
        return self._flat_indices[heads]

    def own_columns(self) -> torch.Tensor:
        """[used] int64, column of each row's latest token; -1 if that is the last one of a shared prompt."""
        return self.positions - self._starts if self.prompts.lengths else self.positions

    def rows_changed(self) -> None:
        """Read again where each row's own columns begin."""
        if self.prompts.lengths:
            self._starts = torch.tensor(self.prompts.starts(), dtype=torch.int64, device=self.positions.device)
        self.clear_indices()

    def clear_indices(self) -> None:
        """Discard indices after rows or columns changed."""
        self._flat_indices.clear()


class SlotCache(Cache):
    """The cache with which a Transformers causal LM decodes one token per row at a time.

    Args:
        num_layers: number of layers with keys and values.
        capacity: initial number of slots.
        first_columns: initial number of columns.
        device: device of the model's input.

    Attributes:
        max_columns: maximum number of columns that a row can need.
    """

    def __init__(self, *, num_layers: int, capacity: int, first_columns: int, device: torch.device) -> None:
        self.slots = SlotTable(capacity=capacity, columns=first_columns, device=device)
        self.max_columns, self._most = first_columns, capacity
        super().__init__(layers=[SlotLayer(self.slots) for _ in range(num_layers)])

    @property
    def prompts(self) -> PromptTable | None:
        """The shared prompts of the rows, if there are any."""
        return self.slots.prompts if self.slots.prompts.lengths else None

    def add(
        self,
        prefill: Cache,
        *,
        sources: Sequence[int],
        lengths: Sequence[int],
        past: Sequence[int],
        shared: Collection[int] = (),
    ) -> None:
        """Assign a slot to every row of `sources`, after the slots in use.

        Args:
            prefill: keys and values of prompts: left-padded earlier tokens, if there are any, then left-padded new ones.
            sources: row of the prefill for each new slot; a prompt's row occurs once per sample.
            lengths: prompt length of each new slot.
            past: number of earlier tokens of each row of the prefill.
            shared: rows of the prefill without earlier tokens, which are stored once for all their slots.

        Raises:
            NotSupportedError: the model has a different number of layers.
        """
        if len(prefill.layers) != len(self.layers):
            raise NotSupportedError(
                f"The model has keys and values in {len(prefill.layers)} layers, but its config describes {len(self.layers)}: "
                "this sampler does not support its attention. Use another generation backend."
            )
        prompts = sorted(shared)
        own_lengths = [0 if source in shared else length for source, length in zip(sources, lengths, strict=True)]
        self._ensure_columns(max(own_lengths))
        device = self.slots.positions.device
        runs = _runs(sources, own_lengths, [past[source] for source in sources], first_slot=self.slots.used, device=device)
        prompt_lengths = [lengths[sources.index(source)] for source in prompts]
        for own, prefilled in zip(self.layers, prefill.layers, strict=True):
            own.load(prefilled, runs=runs, past_width=max(past))
            if prompts:
                own.load_prompts(prefilled, sources=prompts, lengths=prompt_lengths)
        self.slots.prompts.add([prompts.index(source) if source in shared else -1 for source in sources], prompt_lengths)
        new = to_device(torch.tensor(lengths, dtype=torch.int64) - 1, device)
        self.slots.positions = torch.cat([self.slots.positions, new])
        self.slots.used += len(sources)
        self.slots.width = max(self.slots.width, max(own_lengths))
        self.slots.rows_changed()

    def advance(self) -> None:
        """Move each row to its next position, where the next forward pass writes."""
        self._ensure_columns(self.slots.width + 1)
        self.slots.positions = self.slots.positions + 1
        self.slots.width += 1
        self.slots.clear_indices()

    def keep(self, slots: Sequence[int], *, tokens: Sequence[int]) -> None:
        """Drop all rows except those in `slots`; row `slots[i]` moves to slot i.

        Args:
            slots: rows that keep their slot are not copied.
            tokens: number of tokens of each kept row in the cache.
        """
        moves = [(source, target) for target, source in enumerate(slots) if source != target]
        kept = self.slots.prompts.keep(slots)
        width = max(count - start for count, start in zip(tokens, self.slots.prompts.starts(), strict=True))
        self.slots.used, self.slots.width = len(slots), width
        device = self.slots.positions.device
        self.slots.positions = self.slots.positions[to_device(torch.tensor(slots, dtype=torch.int64), device)]
        self.slots.rows_changed()
        for layer in self.layers:
            layer.keep_prompts(kept)
        if moves:
            sources, targets = to_device(torch.tensor(moves), device).unbind(dim=1)
            for layer in self.layers:
                layer.move(sources, targets, width=width)

    def copy_of(self, slot: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [heads, length, head_dim] of each layer, for the first tokens of a slot."""
        start, prompt = self.slots.prompts.start(slot), self.slots.prompts.of_slot[slot]
        layers = []
        for layer in self.layers:
            pair = (layer.keys[slot, :, : max(0, length - start)], layer.values[slot, :, : max(0, length - start)])
            if start:
                assert layer.prompts is not None
                before = (prompts[prompt, :, : min(start, length)] for prompts in layer.prompts)
                pair = _pair(torch.cat([first, rest], dim=1) for first, rest in zip(before, pair, strict=True))
            layers.append(_pair(prompts.clone() for prompts in pair))
        return layers

    def attendable(self, *, window: int | None = None) -> torch.Tensor:
        """[N, K] bool, columns that each row's token may attend to, in addition to its shared prompt.

        Args:
            window: size of the sliding window, including the token itself; unlimited by default.
        """
        positions = self.slots.own_columns().unsqueeze(1)
        columns = torch.arange(self.slots.width, device=positions.device)
        attendable = columns <= positions
        return attendable if window is None else attendable & (columns > positions - window)

    def ensure_slots(self, count: int, *, most: int) -> None:
        """Allocate slots for `count` rows in total; at least twice as many as before, but at most `most`.

        If there are more than `most`, which happens if longer rows arrive, the rest is freed when rows need more columns.
        """
        self._most = most
        if count > self.slots.capacity:
            # Columns that only rows needed which have ended are freed.
            columns = min(self.slots.columns, self.max_columns)
            self._grow(capacity=min(max(2 * self.slots.capacity, count), most), columns=columns)

    def _ensure_columns(self, width: int) -> None:
        if width > self.slots.columns:
            columns = max(min(2 * self.slots.columns, self.max_columns), width)
            self._grow(capacity=min(self.slots.capacity, self._most), columns=columns)

    def _grow(self, *, capacity: int, columns: int) -> None:
        for layer in self.layers:
            layer.grow(capacity=capacity, columns=columns, used=self.slots.used, width=self.slots.width)
        self.slots.capacity, self.slots.columns = capacity, columns
        self.slots.clear_indices()


def _runs(
    sources: Sequence[int], lengths: Sequence[int], past: Sequence[int], *, first_slot: int, device: torch.device
) -> list[PrefillRun]:
    runs: list[PrefillRun] = []
    for (length, earlier), slots in groupby(zip(lengths, past, sources, strict=True), key=itemgetter(0, 1)):
        rows = to_device(torch.tensor([source for *_, source in slots]), device)
        runs.append(PrefillRun(first_slot=first_slot, sources=rows, length=length, past=earlier))
        first_slot += len(rows)
    return runs


def _with_prompts(
    old: torch.Tensor | None, prefilled: torch.Tensor, sources: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """`old` [prompts, heads, P, D] and the last `lengths` columns of rows `sources` of `prefilled`, padded on the right."""
    heads, width, depth = prefilled.shape[1:]
    count, columns = (0, 0) if old is None else (old.shape[0], old.shape[2])
    joined = prefilled.new_zeros((count + len(sources), heads, max(columns, *lengths), depth))
    if old is not None:
        joined[:count, :, :columns] = old
    for number, (source, length) in enumerate(zip(sources, lengths, strict=True), start=count):
        joined[number, :, :length] = prefilled[source, :, width - length :]
    return joined


def _pair(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = tensors
    return keys, values
