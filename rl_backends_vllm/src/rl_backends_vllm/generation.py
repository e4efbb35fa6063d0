"""`VllmGeneration`: vLLM as a generation engine, in this process or on a cluster. Importing it does not load vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_backends_base import DistributedGeneration
from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.device import worker_environment
from rl_backends_vllm.shm_cleanup import remove_stale_folders
from rl_backends_vllm.worker import VllmGenerationWorker
from rl_core.backend import section_from_keywords
from rl_core.config.schema import DeadlineConfig, TokenizerConfig

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

    Rows of `generate_async` that are in progress at a refit keep their tokens and continue with the new weights, under which
    their keys and values are computed again.

    Args:
        cluster: where the replicas run.
        config: the section `policy.generation`, or a mapping of its fields and those of `vllm_cfg`.
        num_workers: number of replicas; by default, as many as the cluster can hold.
        deadlines: timeouts.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed.
    """

    memory_planner = "rl_backends_vllm.planned_memory:EngineMemory"
    config: VllmConfig

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

    @property
    def num_workers(self) -> int:
        return self.group.world_size * self._processes

    @property
    def tokenizer_section(self) -> TokenizerConfig:
        return self.config.vllm_cfg.tokenizer or TokenizerConfig()

    def shutdown(self) -> bool:
        done = super().shutdown()
        remove_stale_folders()
        return done


def _section(config: VllmConfig | Mapping[str, Any] | None) -> VllmConfig:
    """The section; a mapping may also contain fields of `vllm_cfg`."""
    if isinstance(config, VllmConfig):
        return config
    return section_from_keywords("VllmGeneration", VllmConfig, own="vllm_cfg", fields=config or {})
