"""`VllmGeneration`: vLLM as a generation engine, in this process or on a cluster. Importing it does not load vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.device import worker_environment
from rl_backends_vllm.requests import check_stop_strings
from rl_backends_vllm.shm_cleanup import remove_stale_files
from rl_backends_vllm.worker import VllmGenerationWorker
from rl_core.config.keywords import section_from_keywords
from rl_core.config.schema import DeadlineConfig, TokenizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, read_prompts
from rl_core.dispatch.generation import ROW_KEYS, DistributedGeneration
from rl_core.dispatch.rows import select_columns
from rl_core.dispatch.streaming import RowStream
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


class VllmGeneration(DistributedGeneration):
    """Samples with vLLM: paged attention, continuous batching, prefix caching.

    `VllmGeneration(cluster, config)` runs one replica per `tensor_parallel_size * pipeline_parallel_size` bundles of the
    cluster; without a cluster, one replica runs in this process.

    On a GPU shared with a policy, create the engine first and wait for it (`wait_ready`): it measures free memory at start, so
    models loaded meanwhile would take memory that it counts on.

    A row's seed determines its tokens: the same batch gives the same tokens. In a different batch, tokens may differ as far as
    vLLM's arithmetic depends on the batch: by rounding only in float32, more in bfloat16.

    Args:
        cluster: where the replicas run.
        config: the section `policy.generation`, or a mapping of its fields and those of `vllm_cfg`.
        num_workers: number of replicas; by default, as many as the cluster can hold.
        deadlines: timeouts.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster | None = None,
        config: VllmConfig | Mapping[str, Any] | None = None,
        *,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
    ) -> None:
        section = _section(config)
        self._processes = section.vllm_cfg.processes
        replicas = num_workers or section.num_workers
        use_gpus = cluster is not None and cluster.use_gpus
        super().__init__(
            worker_class=VllmGenerationWorker,
            config=section,
            cluster=cluster,
            num_workers=replicas or (max(1, cluster.world_size() // self._processes) if cluster is not None else 1),
            deadlines=deadlines,
            env_vars=worker_environment(use_gpus=use_gpus, python=section.python),
            # On CPUs, the processes of a replica share one bundle; each GPU is a bundle.
            bundles_per_worker=self._processes if use_gpus else 1,
        )
        self._stream = RowStream(self.group, deadline_s=self._deadlines.generate_s)

    @property
    def num_workers(self) -> int:
        return self.group.world_size * self._processes

    @property
    def tokenizer_section(self) -> TokenizerConfig:
        return self.config.vllm_cfg.tokenizer or TokenizerConfig()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        self._check_rows(data)
        return super().generate(data, greedy)

    async def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yield (row, its output) as each row finishes; closing the iterator cancels the others.

        Rows in progress at a refit continue with the new weights or restart (`vllm_cfg.in_flight`); a row is marked with the
        weight version that it started with. If a replica dies, the call fails; the next `generate`, refit or `restart_dead`
        replaces the replica, which streams again once it has the policy's weights.
        """
        self._check_rows(data)
        if self._without_weights:
            self._bring_weights()
        rows = select_columns(data, [key for key in ROW_KEYS if key in data or key == "input_lengths"])
        async for row, output in self._stream.rows(rows, greedy=greedy):
            yield row, output

    def shutdown(self) -> bool:
        done = super().shutdown()
        remove_stale_files()
        return done

    def _check_rows(self, data: BatchedDataDict[GenerationDatumSpec]) -> None:
        """Check rows before dispatch, so that errors name the caller's row and no replica has started."""
        limits = LengthLimits(
            vocab_size=self.facts["vocab_size"],
            max_model_len=self.facts["max_model_len"],
            max_new_tokens=self.config.max_new_tokens,
        )
        check_stop_strings(read_prompts(data, limits), reads_text=self.facts["reads_text"])


def _section(config: VllmConfig | Mapping[str, Any] | None) -> VllmConfig:
    """The section; a mapping may also contain fields of `vllm_cfg`."""
    if isinstance(config, VllmConfig):
        return config
    return section_from_keywords("VllmGeneration", VllmConfig, own="vllm_cfg", fields=config or {})
