"""Refuses to train on samples of an engine that has its own weights. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import GenerationConfig
from rl_core.config.source_tree import dotted
from rl_core.errors import ConfigError
from rl_core.plugins.component import is_path
from rl_core.plugins.registry import Registry
from rl_train.config.component_checks import Finding
from rl_train.config.schema import RunConfig
from rl_train.config.static_attribute import static_attribute

_AT = ("policy", "generation", "backend")


def declares_own_weights(section: GenerationConfig, registry: Registry | None = None) -> bool:
    """Whether the engine of a section has its own weights.

    Args:
        section: `policy.generation`.
        registry: Used to import the class of an engine given by its path, whose `has_own_weights` may be inherited. Without
            it, only a value written in the class body is found.
    """
    if section.has_own_weights or not is_path(section.backend):
        return section.has_own_weights
    if registry is None:
        return static_attribute(section.backend, "has_own_weights") is True
    return getattr(registry.find("generation", section.backend).load(), "has_own_weights", False) is True


def own_weights_conflicts(run: RunConfig, registry: Registry | None = None) -> Iterator[Finding]:
    """An engine with its own weights in a run that samples from the policy; for training, not for an evaluation.

    Args:
        run: The valid sections.
        registry: See `declares_own_weights`.
    """
    section = run.policy.generation
    if section is not None and run.algorithm.runtime_needs.samples and declares_own_weights(section, registry):
        yield _AT, own_weights_refused(run.algorithm_name, section.backend, section.weights_key)


def own_weights_refused(algorithm: str, engine: str, key: str | None = None) -> str:
    """Why an algorithm that samples from the policy cannot use this engine; `key` as `GenerationConfig.weights_key`."""
    other = "hoose an engine that receives the policy's weights"
    remedy = f"C{other}" if key is None else f"Set policy.generation.{key}, so that it receives them, or c{other}"
    return (
        f"the engine {engine!r} has its own weights, which are never those of the policy, so {algorithm} would train on "
        f"samples of another model. {remedy}; this one can be used by `rlcore eval`."
    )


def check_own_weights(run: RunConfig, registry: Registry) -> None:
    """Refuse a run that trains on samples of an engine with its own weights, before its workers start.

    Raises:
        ConfigError: the run samples from the policy, but the engine has its own weights.
    """
    for path, message in own_weights_conflicts(run, registry):
        error = ConfigError(message)
        error.key = dotted(path)
        raise error
