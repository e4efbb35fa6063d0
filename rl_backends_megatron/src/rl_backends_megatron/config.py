"""The section `policy` of the Megatron backend and its consistency checks. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path as file_path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from rl_backends_megatron.checks import find_incompatibilities
from rl_backends_megatron.megatron_section import MegatronConfig as MegatronConfig
from rl_core.config.paths import model_path_problem
from rl_core.config.schema import PolicyConfig
from rl_core.config.section import Devices
from rl_core.config.source_tree import KeyPath

if TYPE_CHECKING:
    from rl_core.config.schema import ClusterConfig, RunSections


class MegatronPolicyConfig(PolicyConfig):
    """`policy` with `backend: megatron`."""

    backend: str = "megatron"
    """Name of a registered policy backend, or the dotted path of its class."""
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """Settings specific to this backend."""

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """A number of ranks that does not fit the parallelism, and parallelism that a local model does not support."""
        if (problem := model_path_problem(self.model_name)) is not None:
            yield ("model_name",), problem
        # Components created in Python bring their own cluster.
        if "cluster" not in run.model_fields_set:
            return
        megatron = self.megatron_cfg
        needed, ranks = megatron.ranks_per_replica, super().data_ranks(run.cluster)
        if ranks % needed:
            sizes = f"{megatron.tensor_model_parallel_size} x {megatron.pipeline_model_parallel_size} x "
            yield (
                ("megatron_cfg",),
                f"tensor x pipeline x context = {sizes}{megatron.context_parallel_size} = {needed} ranks hold one copy of the "
                f"model, but the cluster has {ranks}: use a multiple of {needed} (`cluster.backend: ray`, "
                "`cluster.num_nodes` x `cluster.workers_per_node`).",
            )
            return
        described = _read_model_config(self.model_name)
        if described is not None:
            on_gpu = run.cluster.use_gpus is not False
            for key, reason in find_incompatibilities(described, megatron, world_size=ranks, on_gpu=on_gpu):
                yield ("megatron_cfg", key), reason

    def data_ranks(self, cluster: ClusterConfig) -> int:
        """Number of copies of the model in the cluster."""
        return max(1, super().data_ranks(cluster) // self.megatron_cfg.ranks_per_replica)

    def for_devices(self, devices: Devices) -> Self:
        """This section with `precision` and `use_distributed_optimizer`."""
        shards = self.shards_optimizer(on_gpu=devices.use_gpus)
        megatron = self.megatron_cfg.model_copy(update={"use_distributed_optimizer": shards})
        return super().for_devices(devices).model_copy(update={"megatron_cfg": megatron})

    def shards_optimizer(self, *, on_gpu: bool) -> bool:
        """`megatron_cfg.use_distributed_optimizer`, or its default."""
        given = self.megatron_cfg.use_distributed_optimizer
        return on_gpu and self.optimizer.name in ADAMS if given is None else given

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer.name not in OPTIMIZER_KEYS:
            raise ValueError(
                f"optimizer.name {self.optimizer.name!r} is not supported: Megatron-Core has its own optimizers, which shard "
                f"their state over ranks: {', '.join(OPTIMIZER_KEYS)}"
            )
        if self.optimizer.name not in ADAMS and self.megatron_cfg.use_distributed_optimizer:
            raise ValueError(
                f"megatron_cfg.use_distributed_optimizer: Megatron-Core shards only the state of Adam, but optimizer.name is "
                f"{self.optimizer.name!r}. Use {' or '.join(ADAMS)}, or leave use_distributed_optimizer out"
            )
        allowed = OPTIMIZER_KEYS[self.optimizer.name]
        for key in self.optimizer.kwargs:
            if key not in allowed:
                raise ValueError(
                    f"optimizer.kwargs.{key}: {self.optimizer.name} in Megatron-Core supports {', '.join(allowed)}; leave "
                    "it out, or use the backend `hf`"
                )
        return self


_SHAPE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")


def _read_model_config(model_name: str) -> SimpleNamespace | None:
    """The config.json of a model folder; None if it is missing or lacks the values needed here."""
    try:
        content = json.loads((file_path(model_name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and "model_type" in content and all(isinstance(content.get(key), int) for key in _SHAPE)
    return SimpleNamespace(**content) if whole else None


ADAMS = ("torch.optim.AdamW", "torch.optim.Adam")
_ADAM = ("lr", "betas", "eps", "weight_decay", "decay_matrices_only")
OPTIMIZER_KEYS = {
    **dict.fromkeys(ADAMS, _ADAM),
    "torch.optim.SGD": ("lr", "momentum", "weight_decay", "decay_matrices_only"),
}
"""Optimizers supported by Megatron-Core, by their names in `policy.optimizer`, and their arguments."""
