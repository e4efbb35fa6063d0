"""`MegatronPolicy`: a Hugging Face model trained with Megatron-Core, on a cluster or in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_backends_base import DistributedPolicy
from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig, check_compatibility
from rl_backends_megatron.families import family_of
from rl_backends_megatron.hf_folder import SafetensorsFolder, find_folder, read_config
from rl_backends_megatron.lora_targets import adapted_layers
from rl_backends_megatron.optimizer import check_optimizer
from rl_backends_megatron.worker import MegatronPolicyWorker
from rl_core.backend import (
    ROW_KEYS,
    BatchedDataDict,
    pad_rows_to_multiple,
    refuse_other_head,
    section_from_keywords,
    select_columns,
)
from rl_core.cluster.sharding import NamedSharding
from rl_core.config.schema import DeadlineConfig, GenerationConfig
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


class MegatronPolicy(DistributedPolicy):
    """A causal LM that Megatron-Core scores and trains with tensor, pipeline, context, expert and data parallelism.

    `MegatronPolicy(model_name="path/to/model", tensor_model_parallel_size=2, sequence_parallel=True)` starts two workers on
    this machine's Ray; use `cluster=` to run elsewhere. A single rank without a cluster runs in this process and uses its
    torch.distributed exclusively until `shutdown`.

    Args:
        model_name: name, or folder with safetensors.
        config: the whole section `policy`, instead of `model_name` and the arguments below.
        cluster: where the workers run.
        num_workers: number of ranks; all of the cluster's by default.
        deadlines: timeouts.
        torch_dtype: `float32` or `bfloat16`, as text or torch dtype; alias of `precision`.
        name: used in error messages.
        **fields: any field of `MegatronPolicyConfig` or of its `megatron_cfg`, by name.

    Raises:
        ConfigError: a field does not exist, or the model does not support the parallelism.
        UserError: the model does not exist, or the optimizer's arguments are invalid.
        CheckpointError: its folder has no weights, or incomplete ones.
    """

    memory_planner = "rl_backends_megatron.planned_memory:PolicyMemory"
    checkpoint_conversions = {  # noqa: RUF012
        "hf": "rl_backends_megatron.loading:to_folder",
        "megatron": "rl_backends_megatron.loading:to_megatron",
    }

    def __init__(
        self,
        model_name: str | None = None,
        *,
        config: MegatronPolicyConfig | None = None,
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        torch_dtype: str | torch.dtype | None = None,
        name: str = "policy",
        **fields: Any,
    ) -> None:
        section = section_from_keywords(
            "MegatronPolicy",
            MegatronPolicyConfig,
            own="megatron_cfg",
            fields=fields,
            model_name=model_name,
            torch_dtype=torch_dtype,
            config=config,
            nested={"generation": (GenerationConfig, {"backend": "megatron"})},
        )
        ranks = num_workers or (cluster.world_size() if cluster is not None else section.megatron_cfg.ranks_per_replica)
        folder = find_folder(section.model_name, weights=False)
        hf = read_config(folder)
        family_of(hf, model_name=section.model_name)
        refuse_other_head(hf, section.head, name=section.model_name)
        check_compatibility(
            hf,
            section.megatron_cfg,
            world_size=ranks,
            on_gpu=cluster.use_gpus if cluster is not None else torch.cuda.is_available(),
        )
        check_optimizer(section)
        if (lora := section.megatron_cfg.lora) is not None:
            adapted_layers(hf, lora, model_name=section.model_name)
        if Path(section.model_name).expanduser().is_dir():
            # Otherwise each rank would report the same error a minute later. Models on the hub are downloaded by the ranks.
            with SafetensorsFolder(folder):
                pass
        # With a complete config, the run's YAML determines where workers run.
        needs_cluster = cluster is None and config is None and ranks > 1
        self._own_cluster = _cluster_of(ranks) if needs_cluster else None
        super().__init__(
            worker_class=MegatronPolicyWorker,
            config=section,
            cluster=cluster or self._own_cluster,
            num_workers=ranks,
            deadlines=deadlines,
            sharding=grid(section.megatron_cfg, ranks),
            name=name,
            # Makes kernels start in the order of their calls, so that communication overlaps the intended computation.
            env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample with a full forward pass per token, without a cache: for tests and small runs."""
        self.wait_ready()
        rows = select_columns(data, [key for key in ROW_KEYS if key in data or key in ("input_ids", "input_lengths")])
        shards = pad_rows_to_multiple(rows, self.data_ranks).shard_by_batch_size(self.data_ranks)
        deadline_s = self._deadlines.generate_s
        results = self.group.run_sharded("generate", shards, greedy=greedy, deadline_s=deadline_s)
        output: BatchedDataDict[Any] = BatchedDataDict.from_batches(results)
        return output.slice(0, data.size)

    def shutdown(self) -> bool:
        done = super().shutdown()
        if self._own_cluster is not None:
            self._own_cluster.shutdown()
            self._own_cluster = None
        return done


def grid(megatron: MegatronConfig, ranks: int) -> NamedSharding:
    """The named grid of ranks in Megatron's order: tensor-parallel ranks are adjacent, then context, data, pipeline."""
    return NamedSharding.grid(
        pipeline=megatron.pipeline_model_parallel_size,
        data=ranks // megatron.ranks_per_replica,
        context=megatron.context_parallel_size,
        tensor=megatron.tensor_model_parallel_size,
    )


def _cluster_of(ranks: int) -> RayVirtualCluster:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

    return RayVirtualCluster([ranks], name="megatron")
