"""`HuggingFaceGeneration`: any Transformers causal LM as a generation engine, in this process or on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import torch

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation_worker import HFGenerationWorker
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.config.keywords import section_from_keywords
from rl_core.config.schema import DeadlineConfig, TokenizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, read_prompts
from rl_core.dispatch.generation import DistributedGeneration
from rl_core.errors import NotSupportedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


class HuggingFaceGeneration(DistributedGeneration):
    """Samples from a Transformers causal LM: one prefill per prompt; finished rows leave the batch.

    `HuggingFaceGeneration("path/to/model", max_new_tokens=64)` runs in this process; with `cluster=` it runs one replica per
    bundle of the cluster.

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

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        # Checked before dispatch, so that errors name the caller's row and no replica has started.
        read_prompts(data, self._limits())
        return super().generate(data, greedy)

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield (row, its output) as each row finishes. Other tasks run between rows; decoding blocks their thread.

        Raises:
            NotSupportedError: the engine runs on a cluster, where calls return complete batches only.
        """
        if not isinstance(self.group, InProcessWorkerGroup):
            raise NotSupportedError(
                "HuggingFaceGeneration on a cluster does not support `generate_async`. Use `generate`, or an engine without a "
                "cluster."
            )
        read_prompts(data, self._limits())
        worker: HFGenerationWorker = self.group.worker
        for row, output in worker.stream(data, greedy=greedy):
            yield row, output
            await asyncio.sleep(0)

    def _limits(self) -> LengthLimits:
        return LengthLimits(
            vocab_size=self.facts["vocab_size"],
            max_model_len=self.facts["max_model_len"],
            max_new_tokens=self.config.max_new_tokens,
        )
