"""The section of nodes, workers and timeouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.config.section import Section


class DeadlineConfig(Section):
    """Timeouts of remote calls, in seconds. When one expires, the error names the workers that did not answer."""

    start_s: float = Field(default=600.0, gt=0.0)
    """Timeout for starting workers and loading models, in seconds."""
    generate_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one generation call, in seconds."""
    train_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one training or scoring call, in seconds."""
    refit_s: float = Field(default=600.0, gt=0.0)
    """Timeout for one refit, in seconds."""
    checkpoint_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for saving or loading a checkpoint, in seconds."""
    environment_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one environment turn of the whole batch, in seconds."""


class ResourcesConfig(Section):
    """Nodes and workers of a group of processes."""

    num_nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    workers_per_node: int = Field(default=1, ge=1)
    """Number of ranks per node. On GPUs, each rank uses one GPU."""
    use_gpus: bool | None = None
    """Whether to use GPUs. By default, GPUs are used if there are any; for an engine, if the policy uses them."""
    cpus_per_worker: int | None = Field(default=None, ge=1)
    """Number of CPUs (and threads) per rank. By default, the CPUs of the node are divided evenly among its ranks."""


class ClusterConfig(ResourcesConfig):
    """Nodes, workers and timeouts of a run (`cluster`)."""

    backend: Literal["ray", "in_process"] = "ray"
    """How workers run. `in_process` runs one worker of each kind in the driver process, without Ray, for debugging and fast
    tests."""
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    """Timeouts of remote calls."""
