"""Decodes rows together, one token at a time; rows join and leave between tokens, so finished rows are never computed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from rl_backends_base.rows import Row
from rl_backends_base.token_choice import SamplingParameters, next_tokens
from rl_backends_hf.sampling.kv_cache import CacheBudget, SlotCache
from rl_backends_hf.sampling.prefill import AttentionLayout, PrefillPlan, prefill
from rl_backends_hf.sampling.rows import CachedPrefix, PromptGroup, SessionCache, group_by_prompt
from rl_backends_hf.sampling.shared_prompts import PromptSharing, prefers_products
from rl_backends_hf.transformers_internals import attention_of, cache_keyword
from rl_core.data.batched_data_dict import to_device
from rl_core.errors import NonFiniteError

_FIRST_NEW_COLUMNS: Final = 64
"""Initial number of cache columns beyond the longest prompt that is not shared; the cache doubles when they are used up."""
_REFILL_SHARE: Final = 8
"""Rows join once one in this many slots is free, because a prefill of few rows costs nearly as much as one of many."""


class DecodeLoop:
    """Waiting rows, and rows in slots of a KV cache, which exists only while there are rows.

    Args:
        model: a causal LM in eval mode.
        layout: its attention.
        end_ids: tokens that end a row.
        budget: limits of the rows decoded together.
        prefill_tokens: maximum number of padded tokens of one prefill.
        sharing: whether rows share their prompt; updated if the model does not allow it. They do not by default.
        sessions: keys and values of earlier turns; none by default.

    Attributes:
        weight_version: recorded with each token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: AttentionLayout,
        end_ids: frozenset[int],
        *,
        budget: CacheBudget,
        prefill_tokens: int,
        sharing: PromptSharing | None = None,
        sessions: SessionCache | None = None,
    ) -> None:
        self.weight_version = -1
        self._model, self._layout, self._end_ids = model, layout, end_ids
        self._budget, self._prefill_tokens = budget, prefill_tokens
        self._sharing = PromptSharing(is_supported=False) if sharing is None else sharing
        self._sessions = SessionCache(0) if sessions is None else sessions
        self._device = model.get_input_embeddings().weight.device
        adds_mask = attention_of(model) == "eager" or prefers_products(self._device, model.dtype)
        self._score_dtype = model.dtype if adds_mask else None
        self._cache_keyword = cache_keyword(model)
        self._waiting: deque[PromptGroup] = deque()
        self._active: list[Row] = []
        self._cache: SlotCache | None = None
        self._seeds = self._tokens = self._tensor([])

    @property
    def is_idle(self) -> bool:
        """Whether there are no rows."""
        return not self._waiting and not self._active

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows; those with equal tokens share their prefill if they have not started."""
        for group in group_by_prompt(rows):
            same = next((waiting for waiting in self._waiting if waiting.prompt == group.prompt), None)
            if same is None:
                self._waiting.append(group)
            else:
                same.rows.extend(group.rows)

    def remove(self, rows: Collection[Row]) -> None:
        """Drop unfinished rows."""
        gone = {id(row) for row in rows}
        left = [group.without(gone) for group in self._waiting]
        self._waiting = deque(group for group in left if group.rows)
        remaining = [slot for slot, row in enumerate(self._active) if id(row) not in gone]
        if len(remaining) < len(self._active):
            self._keep(remaining)

    def recompute(self) -> None:
        """Discard all keys and values; active rows keep their tokens, and are computed again from their start."""
        self._waiting.extendleft(reversed(group_by_prompt(self._active)))
        self._active, self._cache = [], None
        self._seeds = self._tokens = self._tensor([])

    def step(self) -> list[Row]:
        """Draw at least one token for every active row; returns rows that ended, with a `NonFiniteError` in `error` if so."""
        ended: list[Row] = []
        while self._should_prefill():
            for plan in self._plans(self._next_groups()):
                ended += self._prefill(plan)
        if self._active:
            ended += self._advance()
        return ended

    def _should_prefill(self) -> bool:
        """Whether enough slots are free for a prefill."""
        if not self._waiting or not self._active:
            return bool(self._waiting)
        capacity = self._capacity()
        free = capacity - len(self._active)
        if free < capacity // _REFILL_SHARE and free < sum(len(group.rows) for group in self._waiting):
            return False
        return len(self._waiting[0].rows) <= free

    def _capacity(self) -> int:
        """Number of rows that may be decoded together; active rows may be more than that once longer ones wait."""
        if not self._budget.is_limited:
            return self._budget.max_rows
        if self._cache is None:
            self._budget.measure()
        waiting = (row for group in self._waiting for row in group.rows)
        return self._budget.rows(longest=max(row.longest for row in (*self._active, *waiting)))

    def _next_groups(self) -> list[PromptGroup]:
        """Waiting groups that fit into the free slots and one prefill; a group larger than all slots is split."""
        free, taken = self._capacity() - len(self._active), list[PromptGroup]()
        width = 0
        while self._waiting:
            group = self._waiting[0]
            width = max(width, len(group.prompt))
            if taken and (len(taken) + 1) * width > self._prefill_tokens:
                break
            if len(group.rows) > free:
                if not taken:
                    taken.append(PromptGroup(prompt=group.prompt, rows=group.rows[:free]))
                    self._waiting[0] = PromptGroup(prompt=group.prompt, rows=group.rows[free:])
                break
            taken.append(self._waiting.popleft())
            free -= len(group.rows)
        return taken

    def _plans(self, groups: list[PromptGroup]) -> list[PrefillPlan]:
        """One prefill for groups that start from their prompt, and others for those that continue a session."""
        fresh, resumed = list[PromptGroup](), list[PrefillPlan]()
        for group in groups:
            prefix = self._prefix_of(group)
            if prefix is None:
                fresh.append(group)
            elif resumed and self._layout.window is None:
                resumed[0].groups.append(group)
                resumed[0].prefixes.append(prefix)
            else:  # padding between earlier and new tokens would be counted as part of a sliding window
                resumed.append(PrefillPlan(groups=[group], prefixes=[prefix]))
        return [*([PrefillPlan(groups=fresh, prefixes=[])] if fresh else []), *resumed]

    def _prefix_of(self, group: PromptGroup) -> CachedPrefix | None:
        """The longest prefix that the sessions of the group's rows have left."""
        kept = [self._sessions.take(row.session) for row in group.rows if row.session is not None]
        prefixes = [prefix.of(group.prompt) for prefix in kept if prefix is not None]
        best = max(prefixes, key=lambda prefix: len(prefix.tokens), default=None)
        return best if best is not None and best.tokens else None

    def _prefill(self, plan: PrefillPlan) -> list[Row]:
        """Compute each group's prompt once, and give every row a slot and its first token; returns rows that ended."""
        logits, prefilled = prefill(self._model, plan)
        sources = [source for source, group in enumerate(plan.groups) for _ in group.rows]
        rows = [row for group in plan.groups for row in group.rows]
        shared = [] if plan.prefixes else [number for number, group in enumerate(plan.groups) if self._shared_tokens(group)]
        self._slots_for(plan.groups).add(
            prefilled, sources=sources, lengths=[row.num_tokens for row in rows], past=plan.past, shared=shared
        )
        first, seeds = len(self._active), self._tensor([row.prompt.seed for row in rows])
        self._active.extend(rows)
        self._seeds = torch.cat([self._seeds, seeds])
        self._tokens = torch.cat([self._tokens, torch.zeros_like(seeds)])
        return self._draw(logits[self._tensor(sources)], first=first)

    def _shared_tokens(self, group: PromptGroup) -> int:
        return self._sharing.shared_tokens(group.prompt, len(group.rows))

    def _slots_for(self, groups: Sequence[PromptGroup]) -> SlotCache:
        """The cache, with free slots for the rows of `groups`."""
        rows = [row for group in groups for row in group.rows]
        begun = [*self._active, *rows]
        known = [*begun, *(row for group in self._waiting for row in group.rows)]
        max_columns = max(row.longest for row in (begun if self._budget.is_limited else known))
        capacity = self._budget.rows(longest=max_columns)
        if self._cache is None:
            first_columns = _FIRST_NEW_COLUMNS + max(
                len(group.prompt) - self._shared_tokens(group) for group in [*groups, *self._waiting]
            )
            self._cache = SlotCache(
                num_layers=self._layout.num_layers,
                capacity=min(capacity, len(known)),
                first_columns=min(first_columns, max_columns),
                device=self._device,
            )
        self._cache.max_columns = max_columns
        self._cache.ensure_slots(len(self._active) + len(rows), most=capacity)
        return self._cache

    def _advance(self) -> list[Row]:
        """Compute the latest token of every row, and draw the next; returns rows that ended."""
        cache = self._cache
        assert cache is not None
        cache.advance()
        prompts = cache.prompts
        score_dtype = self._score_dtype if prompts is None else self._model.dtype
        logits = self._model(
            input_ids=self._tokens.unsqueeze(1),
            attention_mask=self._layout.mask(cache, score_dtype=score_dtype),
            position_ids=cache.slots.positions.unsqueeze(1),
            use_cache=True,
            **{self._cache_keyword: cache},
            **({} if prompts is None else {"slot_cache": cache}),
        ).logits[:, -1]
        if prompts is not None and prompts.calls_of_pass() != self._layout.num_layers:
            # A layer with other attention, such as a soft cap, did not read the prompts: start again without sharing.
            self._sharing.is_supported = False
            self.recompute()
            return self.step()
        return self._draw(logits, first=0)

    def _draw(self, logits: torch.Tensor, *, first: int) -> list[Row]:
        """Draw a token for the rows from slot `first` on, and remove finished rows, which are returned."""
        assert self._cache is not None
        drawn, logprobs, likely = self._next_tokens(logits, first)
        self._tokens[first:] = drawn
        rows = self._active[first:]
        ended: list[Row] = []
        remaining = list(range(first))
        # One tensor, because the host waits for each that it reads; float64 is exact for both.
        tokens, numbers = torch.stack([drawn.double(), logprobs.double()]).tolist()
        for number, alternatives in likely.items():
            rows[number].likely.append(alternatives)
        for slot, (row, token, logprob) in enumerate(zip(rows, tokens, numbers, strict=True), start=first):
            if not math.isfinite(logprob):
                row.error = NonFiniteError(
                    f"Row {row.prompt.number}: the logits after {row.num_tokens} tokens are NaN or infinite "
                    f"(log-probability {logprob}). The weights are invalid, or bfloat16 overflowed. Check the previous step."
                )
                ended.append(row)
            elif row.append(int(token), logprob, version=self.weight_version, end_ids=self._end_ids):
                ended.append(row)
            else:
                remaining.append(slot)
                continue
            if row.session is not None and row.error is None:
                self._sessions.put(row.session, row.sequence[:-1], self._cache, slot)
        if ended:
            self._keep(remaining)
        return ended

    def _next_tokens(
        self, logits: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, list[tuple[int, float]]]]:
        """For the rows from slot `first` on: [N] tokens, [N] log-probabilities, and the most likely tokens of rows that ask."""
        assert self._cache is not None
        seeds, positions = self._seeds[first:], self._cache.slots.positions[first:] + 1
        rows = self._active[first:]
        tokens, logprobs = torch.empty_like(seeds), torch.empty(len(seeds), device=self._device)
        likely: dict[int, list[tuple[int, float]]] = {}
        for (greedy, parameters, num_likely), numbers in _alike(rows).items():
            index = slice(None) if len(numbers) == len(rows) else self._tensor(numbers)
            alike = [rows[number] for number in numbers]
            tokens[index], logprobs[index], alternatives = next_tokens(
                logits[index],
                parameters=parameters,
                greedy=greedy,
                seeds=seeds[index],
                positions=positions[index],
                history=self._history(alike) if parameters.repetition_penalty != 1.0 else None,
                sampled=[row.tokens for row in alike],
                likely=num_likely,
            )
            likely |= zip(numbers, alternatives, strict=False)
        return tokens, logprobs, likely

    def _keep(self, remaining: list[int]) -> None:
        """Keep only the slots `remaining` (ascending); the last of them fill the gaps."""
        order = _compacted(remaining)
        self._active = [self._active[slot] for slot in order]
        if self._active and self._cache is not None:
            self._cache.keep(order, tokens=[row.num_tokens - 1 for row in self._active])
        else:
            self._cache = None
        index = self._tensor(order)
        self._seeds, self._tokens = self._seeds[index], self._tokens[index]

    def _history(self, rows: Sequence[Row]) -> torch.Tensor:
        """[N, T], the tokens of each row, padded with its first token."""
        held = [row.sequence for row in rows]
        width = max(len(tokens) for tokens in held)
        return self._tensor([tokens + tokens[:1] * (width - len(tokens)) for tokens in held])

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def _alike(rows: Sequence[Row]) -> dict[tuple[bool, SamplingParameters, int], Sequence[int]]:
    """Numbers of the rows by how they are sampled."""
    greedy, parameters = rows[0].greedy, rows[0].parameters
    if all(row.greedy == greedy and row.parameters is parameters for row in rows):  # hashing them takes longer
        return {(greedy, parameters, rows[0].num_likely): range(len(rows))}
    kinds: dict[tuple[bool, SamplingParameters, int], list[int]] = {}
    for number, row in enumerate(rows):
        kinds.setdefault((row.greedy, row.parameters, row.num_likely), []).append(number)
    return dict(kinds)


def _compacted(remaining: list[int]) -> list[int]:
    """Slots in their new order: the last ones fill the gaps, so that few rows move."""
    taken = set(remaining)
    movers = [slot for slot in reversed(remaining) if slot >= len(remaining)]
    return [target if target in taken else movers.pop() for target in range(len(remaining))]
