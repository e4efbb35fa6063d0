"""`HuggingFacePolicy`: any Transformers causal LM as a policy, in this process or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_backends_base import DistributedPolicy
from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.backend import section_from_keywords
from rl_core.config.schema import DeadlineConfig

if TYPE_CHECKING:
    from rl_core.cluster.sharding import NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


class HuggingFacePolicy(DistributedPolicy):
    """A Transformers causal LM that scores, trains, samples and exports its weights.

    `HuggingFacePolicy("path/to/model", torch_dtype="bfloat16")` runs in this process; with `cluster=` it runs on the cluster's
    ranks.

    Args:
        model_name: name, folder or GGUF file.
        config: the whole section `policy`, instead of `model_name` and the arguments below.
        cluster: where the workers run; without one, a single worker runs in this process.
        num_workers: number of ranks; all of the cluster's by default.
        deadlines: timeouts.
        sharding: the named grid of ranks; all of them along `data` by default.
        torch_dtype: `float32` or `bfloat16`, as text or torch dtype; alias of `precision`.
        name: used in error messages.
        **fields: any field of `HFPolicyConfig` or of its `hf_cfg`, by name: `trust_remote_code`, `device_map`, `load_in_8bit`,
            `optimizer={...}`, `generation={...}` and so on.

    Raises:
        ConfigError: a field does not exist or has a value that is not allowed.
    """

    checkpoint_conversions = {"hf": "rl_backends_hf.convert:to_folder"}  # noqa: RUF012
    memory_planner = "rl_backends_hf.planned_memory:PolicyMemory"

    def __init__(
        self,
        model_name: str | None = None,
        *,
        config: HFPolicyConfig | None = None,
        cluster: RayVirtualCluster | None = None,
        num_workers: int | None = None,
        deadlines: DeadlineConfig | None = None,
        sharding: NamedSharding | None = None,
        torch_dtype: str | torch.dtype | None = None,
        name: str = "policy",
        **fields: Any,
    ) -> None:
        super().__init__(
            worker_class=HFPolicyWorker,
            config=section_from_keywords(
                "HuggingFacePolicy",
                HFPolicyConfig,
                own="hf_cfg",
                fields=fields,
                model_name=model_name,
                torch_dtype=torch_dtype,
                config=config,
                nested={"generation": (HFGenerationConfig, {})},
            ),
            cluster=cluster,
            num_workers=num_workers,
            deadlines=deadlines,
            sharding=sharding,
            name=name,
        )
