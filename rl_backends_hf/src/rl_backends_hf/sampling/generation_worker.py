"""One replica of the Transformers engine: loads a model, samples from it, and receives the policy's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_backends_base import SamplingParameters, TokenwiseWorker
from rl_backends_hf.config import HFGenerationConfig, generation_advice
from rl_backends_hf.model import DTYPES, is_quantized, load_model
from rl_backends_hf.sampling.sampler import SlotRows, probe_sampling
from rl_core.backend import CheckpointNames, GenerationFacts, RefitManifest, find_tokenizer, weights_of
from rl_core.config.schema import TokenizerConfig
from rl_core.errors import NotSupportedError


class HFGenerationWorker(SlotRows, TokenwiseWorker[HFGenerationConfig]):
    """One replica.

    Args:
        context: rank, master address and device.
        config: the section `policy.generation`.
    """

    def setup(self) -> GenerationFacts:
        facts = super().setup()
        probe_sampling(self)
        return facts

    def build(self) -> torch.nn.Module:
        options, name = self.config.hf_cfg, str(self.config.model_name)
        model: torch.nn.Module = load_model(
            name, options=options, dtype=DTYPES[options.precision or "float32"], device=self.context.device
        )
        self._names = CheckpointNames(model, {name: tensor.shape for name, tensor in weights_of(model).items()})
        self.attach(model, self.config)
        return model

    def facts(self) -> Mapping[str, Any]:
        return {
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
            "device": str(self.model.device),
            "precision": self.config.hf_cfg.precision or "float32",
        }

    def find_tokenizer(self) -> Any:
        options, name = self.config.hf_cfg, str(self.config.model_name)
        return find_tokenizer(name, options.tokenizer or TokenizerConfig(), trust_remote_code=options.trust_remote_code)

    def sampling_parameters(self) -> SamplingParameters:
        return SamplingParameters.of(self.config, repetition_penalty=self.config.hf_cfg.repetition_penalty)

    @property
    def sampling_seed(self) -> int:
        return self.config.hf_cfg.seed

    @property
    def can_offload(self) -> bool:
        return self.config.hf_cfg.device_map is None and not is_quantized(self.model)

    def memory_advice(self, doing: str) -> str:
        return generation_advice(self.config, doing)

    def close_sessions(self, sessions: Sequence[str]) -> None:
        self.sessions.close(sessions)

    def named_weights(self) -> Mapping[str, torch.Tensor]:
        return self._names.view_by_name(self.replaceable_weights())

    def replaceable_weights(self) -> Mapping[str, torch.Tensor]:
        return weights_of(self.model)

    def to_replaceable(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._names.merge(tensors)

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        if is_quantized(self.model):
            raise NotSupportedError(
                "A sampling model loaded with load_in_8bit or load_in_4bit cannot receive the policy's weights. Remove the "
                "option from `policy.generation.hf_cfg`; `precision: bfloat16` needs half the memory of float32.",
                key="policy.generation.hf_cfg",
            )
        return super().prepare_refit_info(info)
