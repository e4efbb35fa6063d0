"""Base class of generation workers that sample token by token; the author defines the model and what it keeps of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from rl_backends_base.adapters import add_adapters
from rl_backends_base.config import TokenwiseConfig
from rl_backends_base.row_sampler import Results, RowSampler, TokenModel
from rl_backends_base.token_choice import SamplingParameters
from rl_core.backend import (
    BatchedDataDict,
    GenerationFacts,
    GenerationRequest,
    GenerationWorker,
    RefitManifest,
    WeightSink,
    WorkerContext,
    end_token_ids,
    find_tokenizer,
    return_freed_memory,
    weights_of,
)
from rl_core.config.schema import GenerationConfig, TokenizerConfig
from rl_core.errors import ConfigError, InvalidComponentError

ConfigT = TypeVar("ConfigT", bound=GenerationConfig)


class TokenwiseWorker(TokenModel, WeightSink, GenerationWorker, Generic[ConfigT]):
    """One replica of an engine.

    The base class samples (`generate`, and `poll` with streaming and refits in flight), finds stop strings and end tokens, and
    receives weights. A subclass provides:

    - `build`: the model.
    - `facts`: `vocab_size` and `max_model_len`.
    - `prefill`: logits of the token after each row.
    - `decode`, if the engine keeps a state of each row (`Row.state`), or one cache for all rows, which `keep` updates.

    Its section derives from `TokenwiseConfig`, unless tokenizer and limit have other keys there. It may also override
    `find_tokenizer`, `sampling_parameters`, `sampling_seed`, `can_offload`, `named_weights` (if the names of the checkpoint are
    not those of the modules), and the other methods of `TokenModel`. Its plugin declares `top_p`, `top_k`,
    `sampled_sets`, `top_logprobs`, `async_rows`, `refit_in_flight`, `held_weight_digests`, each transport, and, if the linear
    layers of the model are `nn.Linear` with the names of the checkpoint, `lora_adapters`.

    Args:
        context: rank, master address and device.
        config: the section `policy.generation`.

    Attributes:
        model: what `build` returned.
    """

    def __init__(self, context: WorkerContext, config: ConfigT) -> None:
        self.context, self.config = context, config
        self.model: Any = None

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """The model with the weights of `config.model_name`, on any device; called once."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """`vocab_size` and `max_model_len` of the model, and further `GenerationFacts`; called after `build`.

        `max_model_len` of a `TokenwiseConfig` lowers that of the model.
        """

    def find_tokenizer(self) -> Any:
        """The tokenizer that the section names, or the model's, which stop strings require; None if there is none."""
        own = self.config.tokenizer if isinstance(self.config, TokenwiseConfig) else None
        return find_tokenizer(str(self.config.model_name), own or TokenizerConfig())

    def sampling_parameters(self) -> SamplingParameters:
        """The distribution that tokens are drawn from; by default, by `temperature`, `top_k`, `top_p` and `min_p`."""
        return SamplingParameters.of(self.config)

    @property
    def sampling_seed(self) -> int:
        """For rows without a seed; by default, that of the process."""
        return self.context.seed

    @property
    def can_offload(self) -> bool:
        """Whether the weights may be moved to CPU memory while the engine is idle."""
        return True

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        return weights_of(self.model)

    def expect_adapters(self, ranks: Mapping[str, int]) -> None:
        add_adapters(self.model, ranks)

    def setup(self) -> GenerationFacts:
        if self.config.model_name is None:
            raise ConfigError(
                "`policy.generation.model_name` is required, because there is no policy to take it from.",
                key="policy.generation.model_name",
            )
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        self.model = self.build()
        if not isinstance(self.model, torch.nn.Module):
            raise InvalidComponentError(
                f"{type(self).__name__}.build must return a torch module, not {type(self.model).__name__}."
            )
        self.model.eval().requires_grad_(False)
        facts, tokenizer = dict(self.facts()), self.find_tokenizer()
        for name in ("vocab_size", "max_model_len"):
            if not isinstance(facts.get(name), int):
                raise InvalidComponentError(
                    f"{type(self).__name__}.facts must have an int as `{name}`, not {facts.get(name)!r}."
                )
        if isinstance(self.config, TokenwiseConfig) and self.config.max_model_len is not None:
            facts["max_model_len"] = min(facts["max_model_len"], self.config.max_model_len)
        sources = (getattr(self.model, "generation_config", None), getattr(self.model, "config", None), tokenizer)
        self._sampler = RowSampler(
            self,
            self.config,
            vocab_size=facts["vocab_size"],
            max_model_len=facts["max_model_len"],
            end_ids=end_token_ids(*sources, further=self.config.stop_token_ids, repeated=self.config.eos_token_id),
            tokenizer=tokenizer,
            parameters=self.sampling_parameters(),
            seed=self.sampling_seed,
            rank=self.context.rank,
            reads_images=bool(facts.get("images")),
        )
        self.prepare_for_generation()
        return {
            "device": self.context.device,
            "reads_text": tokenizer is not None,
            "reads_sampling": True,
            "row_options": self._sampler.row_options,
            "streams_tokens": True,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            **facts,  # type: ignore[typeddict-item]
        }

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"weights": self.model.parameters()} if self.model is not None else {}

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self.prepare_for_generation()
        self.require_complete_weights()
        self.refuse_changed_weights()
        return self._sampler.generate(data, greedy=greedy, weight_version=self.get_weight_version())

    def batch_progress(self) -> tuple[int, int]:
        rows = self._sampler.batch
        return sum(row.has_ended for row in rows), sum(len(row.tokens) for row in rows)

    def poll(self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1) -> Results:
        if arrivals:
            self.prepare_for_generation()
        if not cancelled:  # rows can be cancelled after an optimizer step, but not continue
            self.refuse_changed_weights()
        return self._sampler.poll(arrivals, cancelled=cancelled, wait_s=wait_s, weight_version=self.get_weight_version())

    def prepare_for_generation(self) -> None:
        if self._can_move_weights:
            self.model.to(self.context.device)

    def finish_generation(self) -> None:
        self._sampler.release_if_idle()
        return_freed_memory()
        if self.context.device == "cuda":
            if self._can_move_weights:
                self.model.to("cpu")
            torch.cuda.empty_cache()

    @property
    def _can_move_weights(self) -> bool:
        """Whether the weights may leave the GPU: no row or policy uses them."""
        return self.context.device == "cuda" and self.can_offload and not (self._shared or len(self._sampler))

    def refit_begins(self) -> None:
        self._sampler.pause()

    def invalidate_kv_cache(self) -> bool:
        """Discard what is kept of rows; those that a refit has paused continue, unless its weights are incomplete."""
        self._sampler.drop_cache()
        if not self.has_incomplete_weights:
            self._sampler.resume()
        return True

    def digests_of_weights(self) -> dict[str, str]:
        self.prepare_for_generation()
        return super().digests_of_weights()

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        self.prepare_for_generation()
        dtypes = super().prepare_refit_info(info)
        self._sampler.pause()
        return dtypes

    def shutdown(self) -> None:
        self.leave_refit()
        if (sampler := getattr(self, "_sampler", None)) is not None:
            sampler.drop_cache()  # what is prepared for sampling refers to the model
