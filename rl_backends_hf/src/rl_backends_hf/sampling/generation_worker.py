"""One replica of the Transformers engine: loads a model, samples from it, and receives the policy's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.memory_advice import generation_advice
from rl_backends_hf.model import DTYPES, is_quantized, load_model
from rl_backends_hf.sampling.rows_in_flight import RowsInFlight
from rl_backends_hf.sampling.sampler import Sampler, SamplerSettings
from rl_backends_hf.sampling.sampling_probe import probe_sampling
from rl_backends_hf.sampling.token_choice import ROW_OPTIONS
from rl_core.backend import (
    BatchedDataDict,
    CheckpointNames,
    GenerationFacts,
    GenerationRequest,
    GenerationWorker,
    RefitManifest,
    WeightSink,
    WorkerContext,
    find_tokenizer,
    return_freed_memory,
    weights_of,
)
from rl_core.config.schema import TokenizerConfig
from rl_core.errors import ConfigError, NotSupportedError, RLCoreError


class HFGenerationWorker(WeightSink, GenerationWorker):
    """One replica.

    Args:
        context: rank, master address and device.
        config: the section `policy.generation`.
    """

    def __init__(self, context: WorkerContext, config: HFGenerationConfig) -> None:
        self.context = context
        self._config = config
        self._model: Any = None

    def setup(self) -> GenerationFacts:
        if self._config.model_name is None:
            raise ConfigError(
                "`policy.generation.model_name` is required, because there is no policy to take it from.",
                key="policy.generation.model_name",
            )
        if not self.context.run_in_process:
            torch.set_num_threads(self.context.num_threads)
        options = self._config.hf_cfg
        dtype = DTYPES[options.precision or "float32"]
        self._model = load_model(self._config.model_name, options=options, dtype=dtype, device=self.context.device)
        self._model.requires_grad_(False)
        self._names = CheckpointNames(self._model, {name: t.shape for name, t in weights_of(self._model).items()})
        self._sampler = Sampler(
            self._model,
            settings=SamplerSettings.from_config(self._config),
            tokenizer=find_tokenizer(
                self._config.model_name, options.tokenizer or TokenizerConfig(), trust_remote_code=options.trust_remote_code
            ),
            seed=options.seed,
            rank=self.context.rank,
        )
        probe_sampling(self._sampler)
        self._rows = RowsInFlight(self._sampler, session_bytes=options.session_cache_mb * 2**20)
        return {
            "max_model_len": self._sampler.max_model_len,
            "vocab_size": self._sampler.vocab_size,
            "device": str(self._model.device),
            "reads_text": self._sampler.tokenizer is not None,
            "reads_sampling": True,
            "row_options": ROW_OPTIONS,
            "streams_tokens": True,
            "precision": options.precision or "float32",
            "num_parameters": sum(parameter.numel() for parameter in self._model.parameters()),
        }

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"weights": self._model.parameters()} if self._model is not None else {}

    def memory_advice(self, doing: str) -> str:
        return generation_advice(self._config, doing)

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        self.prepare_for_generation()
        self.require_complete_weights()
        self.refuse_changed_weights()
        answer: BatchedDataDict[Any] = self._sampler.generate(data, greedy, weight_version=self.get_weight_version())
        return answer

    def batch_progress(self) -> tuple[int, int]:
        rows = self._sampler.batch
        return sum(row.has_ended for row in rows), sum(len(row.tokens) for row in rows)

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        if arrivals:
            self.prepare_for_generation()
        if not cancelled:
            self.refuse_changed_weights()
        return self._rows.poll(arrivals, cancelled=cancelled, wait_s=wait_s, weight_version=self.get_weight_version())

    def close_sessions(self, sessions: Sequence[str]) -> None:
        self._rows.close_sessions(sessions)

    def prepare_for_generation(self) -> None:
        if self._can_move_weights:
            self._model.to(self.context.device)

    def finish_generation(self) -> None:
        self._sampler.batch = ()
        self._rows.release_if_idle()
        return_freed_memory()
        if self.context.device == "cuda":
            if self._can_move_weights:
                self._model.to("cpu")
            torch.cuda.empty_cache()

    @property
    def _can_move_weights(self) -> bool:
        """Whether the weights may leave the GPU: no row or policy uses them, and their devices were not chosen when loading."""
        chosen = self._config.hf_cfg.device_map is not None or is_quantized(self._model)
        return self.context.device == "cuda" and not (chosen or self._shared or len(self._rows))

    def refit_begins(self) -> None:
        self._rows.pause()

    def invalidate_kv_cache(self) -> bool:
        """Discard keys and values; rows that a refit has paused continue, unless its weights are incomplete."""
        self._rows.drop_cache()
        if not self.has_incomplete_weights:
            self._rows.resume()
        return True

    def digests_of_weights(self) -> dict[str, str]:
        self.prepare_for_generation()
        return super().digests_of_weights()

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        return self._names.view_by_name(self.replaceable_weights())

    def replaceable_weights(self) -> Mapping[str, torch.Tensor]:
        return weights_of(self._model)

    def to_replaceable(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._names.merge(tensors)

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        if is_quantized(self._model):
            raise NotSupportedError(
                "A sampling model loaded with load_in_8bit or load_in_4bit cannot receive the policy's weights. Remove the "
                "option from `policy.generation.hf_cfg`; `precision: bfloat16` needs half the memory of float32.",
                key="policy.generation.hf_cfg",
            )
        self.prepare_for_generation()
        dtypes = super().prepare_refit_info(info)
        self._rows.pause()
        return dtypes

    def shutdown(self) -> None:
        self.leave_refit()
