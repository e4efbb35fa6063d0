"""Where a run's workers are placed: bundles of the policy and of the engine, and the weight transports between them."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack

import torch

from rl_core.cluster.ray_worker_group import RayWorkerGroup
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.config.schema import ClusterConfig
from rl_core.config.section import Devices
from rl_core.dispatch.worker_facade import local_device
from rl_core.errors import ConfigError, with_key
from rl_core.plugins.component import Kind
from rl_core.plugins.registry import Registry
from rl_train.assembly.contracts import capabilities_of
from rl_train.config.rules.models import models_of, with_models
from rl_train.config.rules.rollouts import default_transports, why_merged
from rl_train.config.schema import RunConfig

_log = logging.getLogger("rlcore")


def make_cluster(config: ClusterConfig, exits: ExitStack, *, groups: int = 2, seed: int = 0) -> RayVirtualCluster | None:
    """The cluster of a run; None if it runs in one process.

    Args:
        config: the section `cluster`.
        exits: closes it.
        groups: number of worker groups that share each bundle: policy, engine and companions.
        seed: random seed of the workers' processes; this process is seeded by `Run.steps`.

    Raises:
        ResourceInsufficientError: there are too few nodes, CPUs or GPUs.
    """
    if config.backend == "in_process":
        _check_device(config.use_gpus)
        return None
    cluster = RayVirtualCluster(
        [config.workers_per_node] * config.num_nodes,
        use_gpus=config.use_gpus,
        max_colocated_worker_groups=groups,
        cpus_per_bundle=config.cpus_per_worker,
        name="run",
        seed=seed,
    )
    exits.callback(cluster.shutdown)
    return cluster


class _Gpu:
    """A worker that reports what its GPU supports."""

    def has_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def resolve_precision(run: RunConfig, cluster: RayVirtualCluster | None) -> RunConfig:
    """The run with the `precision` of the models that do not set it, which depends on the devices."""
    unset = {name: model for name, model in models_of(run).items() if model.precision is None}
    if not unset:
        return run
    use_gpus = local_device() == "cuda" if cluster is None else cluster.use_gpus
    has_bfloat16 = use_gpus and _all_have_bfloat16(run, cluster)
    # A backend's own keys are resolved by its workers, because a checkpoint may have their values.
    precision = next(iter(unset.values())).for_devices(Devices(use_gpus=use_gpus, have_bfloat16=has_bfloat16)).precision
    _log.info("precision of %s: %s, chosen for the devices", ", ".join(unset), precision)
    return with_models(run, {name: model.model_copy(update={"precision": precision}) for name, model in unset.items()})


def resolve_adapters(run: RunConfig, registry: Registry) -> RunConfig:
    """The run with `policy.generation.lora`, if it does not set it and the policy trains adapters."""
    policy, engine = run.policy, run.policy.generation
    if engine is None or engine.lora is not None or policy.lora_rank is None:
        return run
    reason = why_merged(policy, engine, capabilities_of(registry.find(Kind.GENERATION, engine.backend)))
    resolved = engine.model_copy(update={"lora": "adapter" if reason is None else "merged"})
    return run.model_copy(update={"policy": policy.model_copy(update={"generation": resolved})})


def _all_have_bfloat16(run: RunConfig, cluster: RayVirtualCluster | None) -> bool:
    if cluster is None:
        return _Gpu().has_bfloat16()
    group = RayWorkerGroup(cluster, _Gpu, name="GPUs", python=run.policy.python)
    try:
        return all(group.run_all("has_bfloat16", deadline_s=run.cluster.deadlines.start_s))
    finally:
        group.shutdown()


def make_engine_cluster(run: RunConfig, cluster: RayVirtualCluster, exits: ExitStack) -> RayVirtualCluster:
    """Bundles of the engine's own with `policy.generation.resources`; otherwise `cluster`, which it shares with the policy.

    Each of its nodes is the one with the most free resources, so that of the policy only if no other has more.

    Raises:
        ResourceInsufficientError: there are too few nodes, CPUs or GPUs next to those of the policy.
    """
    resources = run.policy.generation.resources if run.policy.generation is not None else None
    if resources is None:
        return cluster
    with with_key("policy.generation.resources"):
        engine_cluster = RayVirtualCluster(
            [resources.workers_per_node] * resources.num_nodes,
            use_gpus=cluster.use_gpus if resources.use_gpus is None else resources.use_gpus,
            cpus_per_bundle=resources.cpus_per_worker,
            name="policy.generation.resources",
            seed=cluster.seed,
        )
    exits.callback(engine_cluster.shutdown)
    return engine_cluster


def transports_between(policy: RayVirtualCluster, engine: RayVirtualCluster) -> tuple[str, ...]:
    """The weight transports to try, the cheapest first."""
    nodes = {bundle.node.node_id for cluster in (policy, engine) for bundle in cluster.bundles}
    return default_transports(len(nodes), on_gpus=policy.use_gpus or engine.use_gpus, is_colocated=policy is engine)


def share_cores(policy: RayVirtualCluster | None, engine: RayVirtualCluster | None) -> bool:
    """Whether policy and engine run on CPUs, on some node with more threads together than it has cores."""
    if policy is None or engine is None or policy.use_gpus or engine.use_gpus:
        return False
    threads, cores = Counter[str](), dict[str, float]()
    for cluster in (policy, engine):
        for bundle in cluster.bundles:
            threads[bundle.node.node_id] += cluster.threads_of(bundle)
            cores[bundle.node.node_id] = bundle.node.cpus
    return any(threads[node] > cores[node] for node in threads)


def _check_device(use_gpus: bool | None) -> None:
    has_gpu = local_device() == "cuda"
    if use_gpus is None or use_gpus == has_gpu:
        return
    if has_gpu:
        what = "this process has a GPU and uses it. Remove use_gpus, or set CUDA_VISIBLE_DEVICES=''."
    else:
        what = "torch finds no GPU in this process. Remove use_gpus, or use a machine with a GPU and torch for CUDA."
    raise ConfigError(f"`cluster.use_gpus: {str(use_gpus).lower()}` with `cluster.backend: in_process`: {what}")
