"""Samples from a Transformers causal LM: one prefill per prompt, then all rows together, one token at a time.

Sampling pads prompts on the left, continues rows from cached keys and values, and shares prompts; prompts of models that
keep other state are computed without padding (`CohortRows`). A model that derives positions from a mask or attends in another
way would silently sample from another distribution, so `probe_sampling` compares a few tokens with the model's own forward pass
at start.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from rl_backends_base import Row, RowSampler, SamplingParameters, TokenModel
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.pictures import attends_within_pictures, has_rope_grid, reads_images
from rl_backends_hf.sampling.cache_budget import CacheBudget
from rl_backends_hf.sampling.cohorts import CohortRows
from rl_backends_hf.sampling.kv_cache import SlotCache
from rl_backends_hf.sampling.packed_linears import packed_linears
from rl_backends_hf.sampling.prefill import AttentionLayout, PrefillPlan, PromptScorer, decoding_attention, prefill
from rl_backends_hf.sampling.rows import CachedPrefix, PromptGroup, SessionCache, group_by_prompt, identity
from rl_backends_hf.sampling.shared_prompts import PromptSharing, prefers_products
from rl_backends_hf.scoring.probe import refusing_errors, tolerance
from rl_backends_hf.transformers_internals import attention_of, cache_keyword
from rl_core.backend import BatchedDataDict, end_token_ids
from rl_core.data.batched_data_dict import to_device
from rl_core.errors import NonFiniteError, NotSupportedError

_log = logging.getLogger(__name__)

_FIRST_NEW_COLUMNS: Final = 64
"""Initial number of cache columns beyond the longest prompt that is not shared; the cache doubles when they are used up."""
_REFILL_SHARE: Final = 8
"""Rows join once one in this many slots is free, because a prefill of few rows costs nearly as much as one of many."""


class SlotRows(TokenModel):
    """Rows in slots of a KV cache, which exists only while rows are in flight; nothing else depends on the weights.

    Rows of a model that keeps something other than keys and values are in cohorts instead, see `CohortRows`.

    Attributes:
        model: a causal LM.
        vocab_size: number of token ids that a prompt may have.
        max_model_len: maximum number of tokens of prompt and completion.
        sessions: keys and values of earlier turns.
    """

    model: Any
    prefill_tokens: int = 8192
    """Maximum number of padded tokens of one prefill."""

    def attach(self, model: PreTrainedModel, config: HFGenerationConfig) -> None:
        """Sample from `model` from now on.

        Raises:
            NotSupportedError: the model computes the logits of every position.
        """
        self.model, hf = model, config.hf_cfg
        self._scorer = PromptScorer.of(model)
        self.scores_prompts = self._scorer is not None
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise NotSupportedError(
                f"{type(model).__name__} is not supported by this sampler: its forward has no `logits_to_keep`, so it would "
                "compute the logits of every position of a prompt. Use another generation backend for this model."
            )
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        bounds = [bound for bound in (hf.max_model_len, own_limit) if bound is not None]
        self.max_model_len = min(bounds, default=2**31)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.max_batch_rows = hf.max_batch_rows
        self._budget = CacheBudget(model, hf)
        self.sessions = SessionCache(hf.session_cache_mb * 2**20)
        layout = AttentionLayout.of(model)
        self._cohorts = None if layout is not None else CohortRows(model, self._scorer, max_tokens=self.prefill_tokens)
        if layout is not None:
            self._layout, self._sharing = layout, PromptSharing.of(model, window=layout.window)
        self._cache_keyword = cache_keyword(model)
        self._has_grid, self._whole_pictures = has_rope_grid(model), attends_within_pictures(model)
        self._cache: SlotCache | None = None
        self._slots: list[Row] = []

    def admit(self, waiting: Sequence[Row], active: Sequence[Row]) -> Sequence[Row]:
        """The rows of whole prompts that fit into the free slots; those of a prompt with more rows than slots are split."""
        capacity = self._capacity([*waiting, *active])
        free = capacity - len(active)
        if active and free < capacity // _REFILL_SHARE and free < len(waiting):
            return []
        taken: list[Row] = []
        for group in group_by_prompt(waiting):
            if len(taken) + len(group.rows) > free:
                return taken if taken or active else group.rows[:free]
            taken += group.rows
        return taken

    def _capacity(self, rows: Sequence[Row]) -> int:
        """Number of rows that may be decoded together; active rows may be more than that once longer ones wait."""
        if not self._budget.is_limited:
            return self._budget.max_rows
        if not self._slots:
            self._budget.measure()
        return self._budget.rows(longest=max(row.longest for row in rows))

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        if self._cohorts is not None:
            computed, begun = self._cohorts.prefill(rows)
            self._slots += begun
            return self._in_order(computed, begun, rows)
        groups, logits = group_by_prompt(rows), list[torch.Tensor]()
        first = len(self._slots)
        for plan in self._plans(groups):
            computed, prefilled = prefill(self.model, plan, self._scorer)
            sources = [source for source, group in enumerate(plan.groups) for _ in group.rows]
            begun = [row for group in plan.groups for row in group.rows]
            shared = [] if plan.prefixes else [index for index, group in enumerate(plan.groups) if self._shared_tokens(group)]
            self._slots_for(begun, groups).add(
                prefilled, sources=sources, lengths=[row.num_tokens for row in begun], past=plan.past, shared=shared
            )
            self._slots += begun
            logits.append(computed[self._tensor(sources)])
        return self._in_order(torch.cat(logits) if len(logits) > 1 else logits[0], self._slots[first:], rows)

    def _plans(self, groups: Sequence[PromptGroup]) -> list[PrefillPlan]:
        """Prefills of groups that start from their prompt, and then of those that continue a session."""
        fresh, resumed = list[PrefillPlan](), list[PrefillPlan]()
        for group in groups:
            prefix = self._prefix_of(group)
            plans = fresh if prefix is None else resumed
            # Padding between earlier and new tokens would be counted as part of a sliding window.
            is_alone = not plans or (prefix is not None and self._layout.window is not None)
            if is_alone or not plans[-1].has_space_for(group, max_tokens=self.prefill_tokens):
                plans.append(PrefillPlan(groups=[], prefixes=[]))
            plans[-1].groups.append(group)
            plans[-1].prefixes.extend([prefix] if prefix else [])
        return fresh + resumed

    def _prefix_of(self, group: PromptGroup) -> CachedPrefix | None:
        """The longest prefix that the sessions of the group's rows have left."""
        kept = [self.sessions.take(row.session) for row in group.rows if row.session is not None]
        if any(row.lacks_prompt_scores for row in group.rows):
            return None  # the hidden states of earlier tokens are not kept
        prefixes = [prefix.of(group.prompt) for prefix in kept if prefix is not None]
        best = max(prefixes, key=lambda prefix: len(prefix.tokens), default=None)
        if best is not None and self._whole_pictures and any(image.end > len(best.tokens) for image in group.images):
            return None  # a mask for tokens within pictures has no columns for earlier ones
        return best if best is not None and best.tokens else None

    def _shared_tokens(self, group: PromptGroup) -> int:
        return self._sharing.shared_tokens(group.prompt, len(group.rows))

    def _slots_for(self, rows: Sequence[Row], groups: Sequence[PromptGroup]) -> SlotCache:
        """The cache, with free slots for `rows`; those of `groups` follow."""
        begun = [*self._slots, *(row for group in groups for row in group.rows)]
        max_columns = max(row.longest for row in begun)
        capacity = self._budget.rows(longest=max_columns)
        if self._cache is None:
            first_columns = _FIRST_NEW_COLUMNS + max(len(group.prompt) - self._shared_tokens(group) for group in groups)
            self._cache = SlotCache(
                num_layers=self._layout.num_layers,
                capacity=min(capacity, len(begun)),
                first_columns=min(first_columns, max_columns),
                device=self._input_device,
            )
        self._cache.max_columns = max_columns
        self._cache.ensure_slots(len(self._slots) + len(rows), most=capacity)
        return self._cache

    def decode(self, rows: Sequence[Row]) -> torch.Tensor:
        if self._cohorts is not None:
            return self._in_order(*self._cohorts.decode(), rows)
        cache = self._cache
        assert cache is not None
        cache.advance()
        prompts = cache.prompts
        adds_mask = prompts is not None or attention_of(self.model) == "eager"
        score_dtype = self.model.dtype if adds_mask or prefers_products(self._input_device, self.model.dtype) else None
        positions = cache.slots.positions
        if self._has_grid and any(row.state for row in self._slots):
            positions = positions + self._tensor([row.state or 0 for row in self._slots])
        logits = self.model(
            input_ids=self._tensor([row.tokens[-1:] for row in self._slots]),
            attention_mask=self._layout.mask(cache, score_dtype=score_dtype),
            position_ids=positions.unsqueeze(1),
            use_cache=True,
            **{self._cache_keyword: cache},
            **({} if prompts is None else {"slot_cache": cache}),
        ).logits[:, -1]
        if prompts is not None and prompts.calls_of_pass() != self._layout.num_layers:
            # A layer with other attention, such as a soft cap, did not read the prompts: start again without sharing.
            self._sharing.is_supported, self._cache, self._slots = False, None, []
            return self.prefill(rows)
        return self._in_order(logits, self._slots, rows)

    def forget(self, rows: Sequence[Row]) -> None:
        """Keep keys and values of sessions whose turn has ended."""
        if self._cohorts is not None:
            return
        slots = {row: slot for slot, row in enumerate(self._slots)}
        for row in rows:
            if row.session is not None and row.has_ended and row.error is None:
                assert self._cache is not None
                self.sessions.put(row.session, identity(row)[:-1], self._cache, slots[row])

    def keep(self, rows: Sequence[Row]) -> None:
        slots = {row: slot for slot, row in enumerate(self._slots)}
        self._slots = list(rows)
        if self._cohorts is not None:
            self._cohorts.keep(rows)
        elif rows and self._cache is not None:
            self._cache.keep([slots[row] for row in rows], tokens=[row.num_tokens - 1 for row in rows])
        else:
            self._cache = None

    @contextmanager
    def prepared(self, *, rows: int, steps: int) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            attention = decoding_attention(self.model) if self._cohorts is None else nullcontext()
            with attention, packed_linears(self.model, rows=rows, steps=steps):
                yield
        finally:
            self.sessions.clear()
            self.model.train(was_training)

    def without_gradients(self) -> AbstractContextManager[Any]:
        # Dynamic rotary embeddings store tensors in the module; created in inference mode, they could not be used in training.
        rope = getattr(self.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        if rope.get("rope_type", "default") in ("dynamic", "longrope"):
            return torch.no_grad()
        return torch.inference_mode()

    @property
    def _input_device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._input_device)

    def _in_order(self, logits: torch.Tensor, present: Sequence[Row], wanted: Sequence[Row]) -> torch.Tensor:
        """Logits of the rows `present` in the order `wanted`."""
        if present == list(wanted):
            return logits
        index = {row: number for number, row in enumerate(present)}
        return logits[self._tensor([index[row] for row in wanted])]


class Sampler(SlotRows):
    """Samples from a model with weights that may change between calls.

    Args:
        model: a causal LM; called in eval mode, and restored afterwards.
        config: how to sample.
        tokenizer: the model's; required for stop strings, and may define another end token.
        seed: for rows without `sample_seeds`.
        rank: index of the replica, whose rows without `sample_seeds` differ from those of others.

    Attributes:
        rows: the rows.

    Raises:
        NotSupportedError: the model computes the logits of every position.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: HFGenerationConfig | None = None,
        *,
        tokenizer: Any = None,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        config = config or HFGenerationConfig()
        self.attach(model, config)
        self.rows = RowSampler(
            self,
            config,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            end_ids=end_token_ids(
                *(model.generation_config, model.config, tokenizer),
                further=config.stop_token_ids,
                repeated=config.eos_token_id,
            ),
            tokenizer=tokenizer,
            parameters=SamplingParameters.of(config, repetition_penalty=config.hf_cfg.repetition_penalty),
            seed=seed,
            rank=rank,
            reads_images=reads_images(model),
        )

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False, *, weight_version: int = -1) -> BatchedDataDict[Any]:
        """Complete every row of `data`; see `RowSampler.generate`."""
        return self.rows.generate(data, greedy=greedy, weight_version=weight_version)


_PROMPTS: Final = ((0, 33), (0, 33), (1, 20))
"""The prompt of each row and its length; the first is long enough to be shared by its rows."""
_NEW: Final = 3


def probe_sampling(sampler: SlotRows) -> None:
    """Compare the log-probabilities of sampled tokens with those of each row alone, without a cache.

    Raises:
        NotSupportedError: they differ, or the model's code fails.
    """
    model, allowed, cohorts = sampler.model, tolerance(sampler.model.dtype), sampler._cohorts
    if cohorts is not None:
        try:
            if _probed(sampler) <= allowed:
                return
        except NotSupportedError:
            pass  # the other way may work
        cohorts.joins = False
    difference = _probed(sampler)
    if not difference <= allowed:
        raise NotSupportedError(
            f"{type(model).__name__}: log-probabilities of sampled tokens differ by {difference:.3g} from those of the model's "
            f"own forward pass ({allowed:g} is allowed), so this sampler would draw from another distribution. Use another "
            "generation backend for this model."
        )
    if cohorts is not None:
        _log.warning(
            "%s: sampling is slower, because rows of different lengths cannot be computed together.", type(model).__name__
        )


def _probed(sampler: SlotRows) -> float:
    """Largest difference between the log-probabilities of a few sampled tokens and those of each row alone."""
    model, longest = sampler.model, sampler.max_model_len - _NEW
    if longest < 1:
        return 0.0
    with refusing_errors(model, "be sampled from; use another generation backend"):
        probe = Sampler(model, HFGenerationConfig(max_new_tokens=_NEW))
        if probe._cohorts is not None and sampler._cohorts is not None:
            probe._cohorts.joins = sampler._cohorts.joins
        try:
            output = probe.generate(_prompts(sampler.vocab_size, longest))
        except NonFiniteError:  # the weights are; the first call of `generate` says so
            return 0.0
        return _largest_difference(sampler, output)


def _prompts(vocab_size: int, longest: int) -> BatchedDataDict[Any]:
    prompts, lengths = torch.tensor(_PROMPTS).unbind(dim=1)
    lengths = lengths.clamp(max=longest)
    ids = torch.randint(vocab_size, (2, int(lengths.max())), generator=torch.Generator().manual_seed(0))[prompts]
    ids = torch.where(torch.arange(ids.shape[1]) < lengths.unsqueeze(1), ids, 0)
    seeds = torch.arange(len(prompts))
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "prompt_id": prompts, "sample_seeds": seeds})


def _largest_difference(sampler: SlotRows, output: BatchedDataDict[Any]) -> float:
    """Between the log-probabilities of sampled tokens and those of a forward pass over their row."""
    model, differences = sampler.model, []
    with sampler.without_gradients():
        for row, end in enumerate(output["unpadded_sequence_lengths"].tolist()):
            ids, first = output["output_ids"][row, :end].to(model.device), end - int(output["generation_lengths"][row])
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, first - 1 : -1].float()
            expected = torch.log_softmax(logits, dim=-1).gather(1, ids[first:, None])[:, 0]
            sampled = output["logprobs"][row, first:end].to(expected.device)
            differences.append((sampled - expected).abs().max())
    return float(torch.stack(differences).max())
