"""`HuggingFaceGeneration`: any Transformers causal LM as a generation engine, in this process or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_backends_base import CheckpointNames, DistributedGeneration, SamplingParameters, TokenwiseWorker
from rl_backends_hf.config import HFGenerationConfig, generation_advice
from rl_backends_hf.model import DTYPES, load_model
from rl_backends_hf.pictures import reads_images
from rl_backends_hf.quantized import is_quantized
from rl_backends_hf.sampling.sampler import SlotRows, probe_sampling
from rl_core.backend import GenerationFacts, RefitManifest, find_tokenizer, section_from_keywords, weights_of
from rl_core.config.schema import DeadlineConfig, TokenizerConfig
from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


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
            "images": reads_images(self.model),
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

    def expect_adapters(self, ranks: Mapping[str, int]) -> None:
        own = {name: self._names.containers([f"{name}.weight"])[0].removesuffix(".weight") for name in ranks}
        super().expect_adapters({own[name]: rank for name, rank in ranks.items()})
        self._names = CheckpointNames(self.model, {name: tensor.shape for name, tensor in weights_of(self.model).items()})

    def prepare_refit_info(self, info: RefitManifest) -> dict[str, str]:
        if is_quantized(self.model):
            raise NotSupportedError(
                "A sampling model loaded with load_in_8bit or load_in_4bit cannot receive the policy's weights. Remove the "
                "option from `policy.generation.hf_cfg`; `precision: bfloat16` needs half the memory of float32.",
                key="policy.generation.hf_cfg",
            )
        return super().prepare_refit_info(info)


class HuggingFaceGeneration(DistributedGeneration):
    """Samples from a Transformers causal LM: one prefill per prompt; rows join while others run, and finished rows leave.

    `HuggingFaceGeneration("path/to/model", max_new_tokens=64)` runs in this process; with `cluster=` it runs one replica per
    bundle of the cluster.

    A row's seed determines its tokens: in float32, a row is sampled equally by `generate` and `generate_async`, with any other
    rows. Rows of `generate_async` that are in progress at a refit keep their tokens and continue with the new weights, under
    which their keys and values are computed again.

    Args:
        model_name: name, folder or GGUF file.
        config: the whole section `policy.generation`, instead of `model_name` and the arguments below.
        cluster: where the replicas run; without one, a single replica runs in this process.
        num_workers: number of replicas; by default, one per bundle of the cluster.
        deadlines: timeouts.
        tokenizer: name or folder of a tokenizer other than the model's, for stop strings.
        torch_dtype: `float32` or `bfloat16`, as text or torch dtype; alias of `precision`.
        **fields: any field of `HFGenerationConfig` or of its `hf_cfg`, by name: `temperature`, `top_p`, `max_new_tokens`,
            `repetition_penalty`, `max_model_len` and so on.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed.
    """

    config: HFGenerationConfig
    memory_planner = "rl_backends_hf.planned_memory:EngineMemory"

    def __init__(
        self,
        model_name: str | None = None,
        *,
        config: HFGenerationConfig | None = None,
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        tokenizer: str | None = None,
        torch_dtype: str | torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        if tokenizer is not None:
            fields["tokenizer"] = TokenizerConfig(name=tokenizer)
        super().__init__(
            worker_class=HFGenerationWorker,
            config=section_from_keywords(
                "HuggingFaceGeneration",
                HFGenerationConfig,
                own="hf_cfg",
                fields=fields,
                model_name=model_name,
                torch_dtype=torch_dtype,
                config=config,
            ),
            cluster=cluster,
            num_workers=num_workers,
            deadlines=deadlines,
        )

    @property
    def tokenizer_section(self) -> TokenizerConfig:
        return self.config.hf_cfg.tokenizer or TokenizerConfig()
