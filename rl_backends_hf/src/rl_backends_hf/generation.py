"""`HuggingFaceGeneration`: any Transformers causal LM as a generation engine, in this process or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling.generation_worker import HFGenerationWorker
from rl_core.backend import DistributedGeneration, section_from_keywords
from rl_core.config.schema import DeadlineConfig, TokenizerConfig

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


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
