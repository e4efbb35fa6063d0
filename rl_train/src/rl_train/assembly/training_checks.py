"""Watches the training of a run's policy and critic, see `rl_train.training_checks`."""

from __future__ import annotations

import torch

from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Kind
from rl_core.plugins.registry import Registry
from rl_train.assembly.workers import Builder
from rl_train.config.schema import RunConfig
from rl_train.diagnostics.model_files import read_model_config
from rl_train.run import Run
from rl_train.training_checks.agreement import Agreement
from rl_train.training_checks.checks import TrainingChecks
from rl_train.weight_sync.synchronizer import WeightSynchronizer

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def watch_training(run: Run, builder: Builder) -> None:
    """Check every optimizer step of the run until its components are closed."""
    config, registry = run.config, builder.registry
    agreement = _agreement(run, builder) if run.generation is not None else None
    weights = run.weights if isinstance(run.weights, WeightSynchronizer) else None
    checks = TrainingChecks(step=lambda: run.step, record=run.metrics.add, weights=weights, agreement=agreement)
    label = component_label(registry, Kind.POLICY, config.policy.backend, run.policy)
    if run.generation is not None and config.policy.generation is not None:
        backend = config.policy.generation.backend
        checks.engine_label = component_label(registry, Kind.GENERATION, backend, run.generation)
    if weights is not None:
        weights.sent.label = label
    checks.watch(run.policy, label, builder.exits, is_policy=True)
    if run.value is not None and config.value is not None:
        value = component_label(registry, Kind.POLICY, config.value.backend, run.value, section="value")
        checks.watch(run.value, value, builder.exits, is_policy=False)
    if agreement is not None:
        run.keep("agreement", agreement)


def component_label(registry: Registry, kind: Kind, name: str, component: object, *, section: str = "") -> str:
    """The name of a component in errors: its kind, class, and the distribution and version that provide it."""
    matches = (each for each in registry.manager.registrations if each.kind is kind and each.component.name == name)
    source = next((f"{name!r} of {each.plugin.label}" for each in matches), f"{type(component).__module__}")
    return f"the {section or kind.label} {type(component).__name__} ({source})"


def _agreement(run: Run, builder: Builder) -> Agreement | None:
    """The rule for engine and policy; None if the engine's log-probabilities are of another distribution."""
    section, weights = run.config.policy.generation, run.weights
    if (
        section is None
        or not isinstance(weights, WeightSynchronizer)
        or run.generation is None
        or section.sampling_filters()
        or section.logit_changes()
    ):
        return None
    sides, float32 = builder.arithmetic(run.generation)
    return Agreement(
        sides=sides,
        exact=float32 and not _uses_tf32(run.generation) and not has_experts(run.config),
        has_canary=weights.has_canary,
        tolerance=section.canary_tolerance,
    )


def _uses_tf32(generation: GenerationInterface) -> bool:
    """Whether float32 products of matrices are rounded on the device of this engine."""
    on_gpu = str(getattr(generation, "facts", {}).get("device", "cpu")).startswith("cuda")
    return on_gpu and torch.get_float32_matmul_precision() != "highest"


def has_experts(config: RunConfig) -> bool:
    """Whether the policy's model is a mixture of experts: a rounding error in its router can choose another expert."""
    hf = read_model_config(config.policy.model_name)
    text = hf.get_text_config(decoder=True) if hf is not None else None
    return any((getattr(text, key, None) or 0) > 1 for key in _EXPERT_KEYS)
