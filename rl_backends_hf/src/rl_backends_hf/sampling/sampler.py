"""Samples from a Transformers causal LM: one prefill per prompt, then all rows together, one token at a time.

Sampling pads prompts on the left, continues rows from cached keys and values, and shares prompts. A model that derives
positions from a mask, attends in another way or keeps other state would silently sample from another distribution, so
`probe_sampling` compares a few tokens with the model's own forward pass at start-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from rl_backends_base.rows import Row, to_rows
from rl_backends_base.token_choice import ROW_OPTIONS, SamplingParameters
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling.decode_loop import DecodeLoop
from rl_backends_hf.sampling.kv_cache import CacheBudget
from rl_backends_hf.sampling.packed_linears import packed_linears
from rl_backends_hf.sampling.prefill import AttentionLayout, decoding_attention
from rl_backends_hf.sampling.rows import SessionCache
from rl_backends_hf.sampling.shared_prompts import PromptSharing
from rl_backends_hf.scoring.probe import refusing_errors, tolerance
from rl_core.backend import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, PromptReader, end_token_ids, to_output
from rl_core.errors import NonFiniteError, NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """How to sample.

    Attributes:
        parameters: the distribution.
        max_new_tokens: maximum number of tokens of a completion.
        max_model_len: maximum number of tokens of prompt and completion; at most, and by default, the model's own limit.
        stop_strings: strings that end a completion, in addition to a row's own.
        stop_token_ids: tokens that end one, in addition to the end-of-sequence tokens of model and tokenizer.
        eos_token_id: must be one of the latter, if it is not None.
        max_batch_rows: maximum number of rows decoded together.
        cache_bytes: memory limit of keys and values; see `CacheBudget`.
        prefill_tokens: maximum number of padded tokens of one prefill.
    """

    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    max_new_tokens: int = 256
    max_model_len: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: int | None = None
    max_batch_rows: int = 256
    cache_bytes: int | None = None
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
            eos_token_id=config.eos_token_id,
            max_batch_rows=config.hf_cfg.max_batch_rows,
            cache_bytes=None if config.hf_cfg.kv_cache_gib is None else int(config.hf_cfg.kv_cache_gib * 2**30),
        )


class Sampler:
    """Samples from a model with weights that may change between calls; nothing that depends on them is kept between calls.

    Args:
        model: a causal LM; called in eval mode, and restored afterwards.
        settings: how to sample.
        tokenizer: the model's; required for stop strings, and may define another end token.
        seed: for rows without `sample_seeds`.
        rank: index of the replica, whose rows without `sample_seeds` differ from those of others.

    Attributes:
        batch: rows of the latest `generate` call, which other threads may read.

    Raises:
        NotSupportedError: the cache does not support the model's attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: SamplerSettings | None = None,
        tokenizer: Any = None,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self.model, self.settings, self.tokenizer = model, settings or SamplerSettings(), tokenizer
        self.batch: Sequence[Row] = ()
        self._layout = AttentionLayout.of(model)
        self._sharing = PromptSharing.of(model, window=self._layout.window)
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise NotSupportedError(
                f"{type(model).__name__} is not supported by this sampler: its forward has no `logits_to_keep`, so it would "
                "compute the logits of every position of a prompt. Use another generation backend for this model."
            )
        sources, own = (model.generation_config, model.config, tokenizer), self.settings
        self._end_ids = end_token_ids(*sources, further=own.stop_token_ids, repeated=own.eos_token_id)
        own_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        bounds = [bound for bound in (self.settings.max_model_len, own_limit) if bound is not None]
        self.max_model_len = min(bounds, default=2**31)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        limits = LengthLimits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_new_tokens=self.settings.max_new_tokens,
        )
        self._reader = PromptReader(
            limits,
            stop_strings=self.settings.stop_strings,
            reads_text=tokenizer is not None,
            reads_sampling=True,
            row_options=ROW_OPTIONS,
            seed=seed,
            rank=rank,
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False, *, weight_version: int = -1
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data`; see `GenerationInterface.generate`.

        Args:
            data: prompts, see `GenerationDatumSpec`.
            greedy: take the most likely token at each position.
            weight_version: recorded with every token.

        Raises:
            DataError: a prompt is empty, contains an id outside the vocabulary, or leaves no tokens within `max_model_len`.
            NonFiniteError: the model's logits are NaN or infinite.
        """
        rows = self.batch = self.read(data, greedy=greedy)
        if rows:
            count = min(len(rows), self.settings.max_batch_rows)
            with self.prepared(rows=count, steps=max(row.prompt.limit for row in rows)), self.without_gradients():
                loop = self.decode_loop(capacity=count)
                loop.weight_version = weight_version
                loop.add(rows)
                while not loop.is_idle:
                    for row in loop.step():
                        if row.error is not None:
                            raise row.error
        return to_output([row.so_far() for row in rows], has_options="sampling" in data)

    def read(self, data: BatchedDataDict[GenerationDatumSpec], *, greedy: bool) -> list[Row]:
        """Read the rows of a `generate` call, which have no sampled tokens yet; raises as `generate`."""
        return to_rows(self._reader.read(data), self.tokenizer, greedy=greedy, parameters=self.settings.parameters)

    def decode_loop(self, *, capacity: int, sessions: SessionCache | None = None) -> DecodeLoop:
        """A loop of at most `capacity` rows at a time; it runs within `prepared` and `without_gradients`."""
        return DecodeLoop(
            self.model,
            self._layout,
            self._end_ids,
            budget=CacheBudget(self.model, max_rows=capacity, max_bytes=self.settings.cache_bytes),
            prefill_tokens=self.settings.prefill_tokens,
            sharing=self._sharing,
            sessions=sessions,
        )

    @contextmanager
    def prepared(self, *, rows: int, steps: int) -> Iterator[None]:
        """Prepare the model for decoding while the block runs, in which its weights must not change.

        Args:
            rows: number of rows.
            steps: approximate number of tokens of each.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with decoding_attention(self.model), packed_linears(self.model, rows=rows, steps=steps):
                yield
        finally:
            self.model.train(was_training)

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Run the model without recording gradients, in this thread."""
        # Dynamic rotary embeddings store tensors in the module; created in inference mode, they could not be used in training.
        rope = getattr(self.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        if rope.get("rope_type", "default") in ("dynamic", "longrope"):
            return torch.no_grad()
        return torch.inference_mode()


_PROMPTS: Final = ((0, 33), (0, 33), (1, 20))
"""The prompt of each row and its length; the first is long enough to be shared by its rows."""
_NEW: Final = 3


def probe_sampling(sampler: Sampler) -> None:
    """Compare the log-probabilities of sampled tokens with those of each row alone, without a cache.

    Raises:
        NotSupportedError: they differ, or the model's code fails.
    """
    model, longest = sampler.model, sampler.max_model_len - _NEW
    if longest < 1:
        return
    settings = replace(
        sampler.settings, parameters=SamplingParameters(), max_new_tokens=_NEW, stop_strings=(), stop_token_ids=()
    )
    with refusing_errors(model, "be sampled from; use another generation backend"):
        try:
            output = Sampler(model, settings=settings).generate(_prompts(sampler.vocab_size, longest))
        except NonFiniteError:  # the weights are; the first call of `generate` says so
            return
        difference = _largest_difference(sampler, output)
    allowed = tolerance(model.dtype)
    if not difference <= allowed:
        raise NotSupportedError(
            f"{type(model).__name__}: log-probabilities of sampled tokens differ by {difference:.3g} from those of the model's "
            f"own forward pass ({allowed:g} is allowed), so this sampler would draw from another distribution. Use another "
            "generation backend for this model."
        )


def _prompts(vocab_size: int, longest: int) -> BatchedDataDict[Any]:
    prompts, lengths = torch.tensor(_PROMPTS).unbind(dim=1)
    lengths = lengths.clamp(max=longest)
    ids = torch.randint(vocab_size, (2, int(lengths.max())), generator=torch.Generator().manual_seed(0))[prompts]
    ids = torch.where(torch.arange(ids.shape[1]) < lengths.unsqueeze(1), ids, 0)
    seeds = torch.arange(len(prompts))
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "prompt_id": prompts, "sample_seeds": seeds})


def _largest_difference(sampler: Sampler, output: BatchedDataDict[Any]) -> float:
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
