"""Samples from a Transformers causal LM: one prefill per prompt, then all rows together, one token at a time.

Rows join and leave the batch during decoding, so finished rows are never computed.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.decode_attention import AttentionLayout, decoding_attention
from rl_backends_hf.kv_cache import SlotCache
from rl_backends_hf.packed_linears import packed_linears
from rl_backends_hf.rows import PromptGroup, Row, group_by_prompt, read_rows, rows_to_output
from rl_backends_hf.sampling import SamplingParameters, next_tokens
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, end_token_ids
from rl_core.errors import NonFiniteError, NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec

_FIRST_NEW_COLUMNS: Final = 64
"""Initial number of cache columns beyond the longest prompt; the cache doubles when they are used up."""
_REFILL_SHARE: Final = 8
"""Rows join once one in this many slots is free, because a prefill of few rows costs nearly as much as one of many."""


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """How to sample.

    Attributes:
        parameters: the distribution.
        max_new_tokens: maximum number of tokens of a completion.
        max_model_len: maximum number of tokens of prompt and completion; at most, and by default, the model's own limit.
        stop_strings: strings that end a completion, in addition to a row's own.
        stop_token_ids: tokens that end one, in addition to the end-of-sequence tokens of model and tokenizer.
        max_batch_rows: maximum number of rows decoded together.
        prefill_tokens: maximum number of padded tokens of one prefill.
    """

    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    max_new_tokens: int = 256
    max_model_len: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_batch_rows: int = 256
    prefill_tokens: int = 8192

    @classmethod
    def from_config(cls, config: HFGenerationConfig, *, max_model_len: int | None = None) -> SamplerSettings:
        """The settings of a section `policy.generation`.

        Args:
            config: the section.
            max_model_len: an additional limit, such as the policy's `max_total_sequence_length`.
        """
        bounds = [bound for bound in (config.hf_cfg.max_model_len, max_model_len) if bound is not None]
        return cls(
            parameters=SamplingParameters(
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                repetition_penalty=config.hf_cfg.repetition_penalty,
            ),
            max_new_tokens=config.max_new_tokens,
            max_model_len=min(bounds, default=None),
            stop_strings=tuple(config.stop_strings or ()),
            stop_token_ids=tuple(config.stop_token_ids or ()),
            max_batch_rows=config.hf_cfg.max_batch_rows,
        )


class Sampler:
    """Samples from a model with weights that may change between calls; no state is kept between calls.

    Args:
        model: a causal LM; called in eval mode, and restored afterwards.
        settings: how to sample.
        tokenizer: the model's; required for stop strings, and may define another end token.
        seed: for rows without `sample_seeds`.

    Raises:
        NotSupportedError: the cache does not support the model's attention.
    """

    def __init__(
        self, model: PreTrainedModel, *, settings: SamplerSettings | None = None, tokenizer: Any = None, seed: int = 0
    ) -> None:
        self.model, self.settings, self.tokenizer = model, settings or SamplerSettings(), tokenizer
        self._layout = AttentionLayout.of(model)
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise NotSupportedError(
                f"{type(model).__name__} is not supported by this sampler: its forward has no `logits_to_keep`, so it would "
                "compute the logits of every position of a prompt. Use another generation backend for this model."
            )
        self._end_ids = end_token_ids(model.generation_config, model.config, tokenizer, further=self.settings.stop_token_ids)
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        bounds = [bound for bound in (self.settings.max_model_len, own_limit) if bound is not None]
        self.max_model_len = min(bounds, default=2**31)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.limits = LengthLimits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_new_tokens=self.settings.max_new_tokens,
        )
        self._seed, self._calls = seed, 0

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False, *, weight_version: int = -1
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data`; see `GenerationInterface.generate`.

        Args:
            data: prompts, see `GenerationDatumSpec`.
            greedy: take the most likely token at each position.
            weight_version: recorded with every row.

        Raises:
            DataError: a prompt is empty, contains an id outside the vocabulary, or leaves no tokens within `max_model_len`.
            NonFiniteError: the model's logits are NaN or infinite.
        """
        rows = self._read(data)
        for _ in self._decode(rows, greedy=greedy):
            pass
        return rows_to_output(rows, weight_version=weight_version)

    def stream(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False, *, weight_version: int = -1
    ) -> Iterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield (row, its output) as each row finishes; the weights must not change before the last."""
        for row in self._decode(self._read(data), greedy=greedy):
            yield row.number, rows_to_output([row], weight_version=weight_version)

    def _read(self, data: BatchedDataDict[GenerationDatumSpec]) -> list[Row]:
        self._calls += 1
        return read_rows(
            data,
            limits=self.limits,
            stop_strings=self.settings.stop_strings,
            tokenizer=self.tokenizer,
            seed=self._seed,
            call=self._calls,
        )

    def _decode(self, rows: list[Row], *, greedy: bool) -> Iterator[Row]:
        if not rows:
            return
        was_training = self.model.training
        self.model.eval()
        try:
            longest = max(row.limit for row in rows)
            with (
                _without_gradients(self.model),
                decoding_attention(self.model),
                packed_linears(self.model, rows=min(len(rows), self.settings.max_batch_rows), steps=longest),
            ):
                yield from _DecodeLoop(self.model, self._layout, self.settings, self._end_ids, rows, greedy=greedy).run()
        finally:
            self.model.train(was_training)


class _DecodeLoop:
    """The state of one call: waiting rows, and rows in slots."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: AttentionLayout,
        settings: SamplerSettings,
        end_ids: frozenset[int],
        rows: list[Row],
        *,
        greedy: bool,
    ) -> None:
        self._model, self._layout, self._settings, self._end_ids, self._greedy = model, layout, settings, end_ids, greedy
        self._device = model.get_input_embeddings().weight.device
        self._eager_dtype = model.dtype if model.config._attn_implementation == "eager" else None
        self._waiting = deque(group_by_prompt(rows))
        self._capacity = min(settings.max_batch_rows, len(rows))
        longest = max(len(row.prompt) for row in rows)
        self._cache = SlotCache(
            num_layers=layout.num_layers,
            capacity=self._capacity,
            first_columns=longest + _FIRST_NEW_COLUMNS,
            max_columns=max(len(row.prompt) + row.limit for row in rows),
            device=self._device,
        )
        self._active: list[Row] = []
        self._seeds = self._tensor([])
        self._tokens = self._tensor([])

    def run(self) -> Iterator[Row]:
        """Yield rows as they finish."""
        while self._waiting or self._active:
            while self._should_prefill():
                yield from self._prefill(self._next_groups())
            if self._active:
                yield from self._step()

    def _should_prefill(self) -> bool:
        """Whether enough slots are free for a prefill."""
        free = self._capacity - len(self._active)
        if not self._waiting or (self._active and free < max(1, self._capacity // _REFILL_SHARE)):
            return False
        return not self._active or len(self._waiting[0].rows) <= free

    def _next_groups(self) -> list[PromptGroup]:
        """Waiting groups that fit into the free slots and one prefill; a group larger than all slots is split."""
        free, taken = self._capacity - len(self._active), list[PromptGroup]()
        width = len(self._waiting[0].prompt)
        while self._waiting and (not taken or (len(taken) + 1) * width <= self._settings.prefill_tokens):
            group = self._waiting[0]
            if len(group.rows) > free:
                if not taken:
                    taken.append(PromptGroup(prompt=group.prompt, rows=group.rows[:free]))
                    self._waiting[0] = PromptGroup(prompt=group.prompt, rows=group.rows[free:])
                break
            taken.append(self._waiting.popleft())
            free -= len(group.rows)
        return taken

    def _prefill(self, groups: list[PromptGroup]) -> Iterator[Row]:
        """Compute each group's prompt once, and give every row a slot and its first token."""
        width = max(len(group.prompt) for group in groups)
        padding = [width - len(group.prompt) for group in groups]
        ids = self._tensor([[0] * pad + group.prompt for pad, group in zip(padding, groups, strict=True)])
        mask = torch.arange(width, device=self._device) >= self._tensor(padding).unsqueeze(1)
        prefilled = DynamicCache()
        logits = self._model(
            input_ids=ids,
            attention_mask=mask if any(padding) else None,
            position_ids=(mask.cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=prefilled,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        sources = [source for source, group in enumerate(groups) for _ in group.rows]
        rows = [row for group in groups for row in group.rows]
        self._cache.add(prefilled, sources=sources, lengths=[len(row.prompt) for row in rows])
        first, seeds = len(self._active), self._tensor([row.seed for row in rows])
        self._active.extend(rows)
        self._seeds = torch.cat([self._seeds, seeds])
        self._tokens = torch.cat([self._tokens, torch.zeros_like(seeds)])
        yield from self._draw(logits[self._tensor(sources)], first=first)

    def _step(self) -> Iterator[Row]:
        """Compute the latest token of every row, and draw the next."""
        self._cache.advance()
        logits = self._model(
            input_ids=self._tokens.unsqueeze(1),
            attention_mask=self._layout.mask(self._cache, eager_dtype=self._eager_dtype),
            position_ids=self._cache.slots.positions.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        yield from self._draw(logits, first=0)

    def _draw(self, logits: torch.Tensor, *, first: int) -> Iterator[Row]:
        """Draw a token for the rows from slot `first` on, and remove finished rows."""
        drawn, logprobs = next_tokens(
            logits,
            parameters=self._settings.parameters,
            greedy=self._greedy,
            seeds=self._seeds[first:],
            positions=self._cache.slots.positions[first:] + 1,
            history=self._history(first),
        )
        self._tokens[first:] = drawn
        rows = self._active[first:]
        ended: list[Row] = []
        remaining = list(range(first))
        for slot, (row, token, logprob) in enumerate(zip(rows, drawn.tolist(), logprobs.tolist(), strict=True), start=first):
            if not math.isfinite(logprob):
                raise NonFiniteError(
                    f"Row {row.number}: the logits after {len(row.tokens)} tokens are NaN or infinite (log-probability "
                    f"{logprob}). The weights are invalid, or bfloat16 overflowed. Check the previous step."
                )
            if row.append(token, logprob, end_ids=self._end_ids):
                ended.append(row)
            else:
                remaining.append(slot)
        if ended:
            self._drop_finished(remaining)
        yield from ended

    def _drop_finished(self, remaining: list[int]) -> None:
        """Keep only the slots `remaining` (ascending); the last of them fill the gaps."""
        order = _compacted(remaining)
        self._active = [self._active[slot] for slot in order]
        self._cache.keep(order, width=max((len(row.tokens) - 1 for row in self._active), default=0))
        index = self._tensor(order)
        self._seeds, self._tokens = self._seeds[index], self._tokens[index]

    def _history(self, first: int) -> torch.Tensor | None:
        """[N, T], the tokens of each row from slot `first` on, padded with its first token."""
        if self._settings.parameters.repetition_penalty == 1.0:
            return None
        held = [row.tokens for row in self._active[first:]]
        width = max(len(tokens) for tokens in held)
        return self._tensor([tokens + tokens[:1] * (width - len(tokens)) for tokens in held])

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _compacted(remaining: list[int]) -> list[int]:
    """Slots in their new order: the last ones fill the gaps, so that few rows move."""
    taken = set(remaining)
    movers = [slot for slot in reversed(remaining) if slot >= len(remaining)]
    return [target if target in taken else movers.pop() for target in range(len(remaining))]


def _without_gradients(model: PreTrainedModel) -> AbstractContextManager[Any]:
    # Dynamic rotary embeddings store tensors in the module; created in inference mode, they could not be used in training.
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return torch.no_grad()
    return torch.inference_mode()
