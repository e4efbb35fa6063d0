"""Asynchronous rollouts: what `rollout.max_staleness` above 0 requires."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.plugins.capabilities import Capability
from rl_core.plugins.component import Kind, is_path
from rl_train.config.rules.rule import TRAINING, CheckedConfig, rule

ENGINE_SHARES_GPUS = (
    "policy and engine share their GPUs, so the engine sleeps while a model is trained and cannot sample ahead. Set "
    "policy.generation.resources, or set rollout.max_staleness to 0."
)
_AT = ("rollout", "max_staleness")


@rule("algorithm", "rollout.max_staleness", "rollout.order", applies_to=TRAINING)
def algorithm_accepts_older_rollouts(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, the algorithm samples and is correct for rollouts of older weights."""
    run = config.run
    if run.rollout.max_staleness == 0:
        return
    needs = run.algorithm.runtime_needs.rollouts
    if needs is None:
        yield Problem(
            _AT, f"{run.algorithm_name} does not sample during training, so there is nothing to sample ahead. Remove it."
        )
        return
    if not needs.accepts_stale:
        yield Problem(
            _AT,
            f"{run.algorithm_name} does not support rollouts that older weights sampled, with these settings "
            "(`RolloutNeeds.accepts_stale`). Set max_staleness to 0.",
        )
    if needs.selects_groups and run.rollout.order == "exact":
        yield Problem(
            ("rollout", "order"),
            "dynamic sampling replaces groups when they end, with the weights of that time, so batches cannot be sampled with "
            "the weights of one step. Use order: ready, or disable dynamic sampling.",
        )


@rule("rollout.max_staleness", "loss_fn", applies_to=TRAINING)
def loss_corrects_for_older_weights(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, the loss corrects for samples of older weights."""
    run = config.run
    if run.rollout.max_staleness > 0 and not run.loss_fn.corrects_for_older_weights:
        yield Problem(
            _AT,
            "the loss treats every sample as one of the current weights, so older samples would bias the gradient. Set "
            "loss_fn.ratio_to: sampler or loss_fn.use_importance_sampling_correction: true, for distillation loss_fn.topk, or "
            "set max_staleness to 0.",
        )


@rule("rollout.max_staleness", "cluster.backend", "cluster.use_gpus", "policy.generation", applies_to=TRAINING)
def engine_is_separate_from_the_policy(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, policy and engine run in separate processes and do not share GPUs."""
    run = config.run
    if run.rollout.max_staleness > 0 and run.cluster.backend == "in_process":
        yield Problem(
            _AT,
            "with cluster.backend: in_process, policy and engine compute in one thread and may share weights, so rollouts "
            "cannot continue during training. Set cluster.backend: ray, or set max_staleness to 0.",
        )
    elif run.rollout.max_staleness > 0 and run.cluster.use_gpus and not run.engine_has_own_resources:
        yield Problem(_AT, ENGINE_SHARES_GPUS)


@rule("rollout.max_staleness", "policy.generation", applies_to=TRAINING)
def engine_samples_single_rows(config: CheckedConfig) -> Iterator[Problem]:
    """With max_staleness above 0, rows of the engine join and leave while others run."""
    run, generation = config.run, config.run.policy.generation
    if run.rollout.max_staleness == 0 or generation is None or is_path(generation.backend):
        return
    if Capability.ASYNC_ROWS not in config.registry.find(Kind.GENERATION, generation.backend).capabilities:
        yield Problem(
            ("policy", "generation", "backend"),
            f"the engine {generation.backend!r} does not have the capability {str(Capability.ASYNC_ROWS)!r}, so its rows "
            "cannot begin and end during training. Set rollout.max_staleness to 0, or choose another engine.",
        )
