"""Checks that every weight sync verifies the tensors that the engine computes with. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig

HELD_DIGESTS = "held_weight_digests"
"""Capability of a generation backend whose weight digests cover the tensors that it computes with."""


def canary_conflicts(run: RunConfig, registry: Registry) -> Iterator[tuple[KeyPath, str]]:
    """Report a disabled canary if the engine's tensors are not verified in any other way."""
    generation = run.policy.generation
    if generation is None or generation.refit_canary or is_path(generation.backend) or generation.has_own_weights:
        return
    known = generation.backend in registry.names(Kind.GENERATION)
    if known and HELD_DIGESTS not in registry.find(Kind.GENERATION, generation.backend).capabilities:
        yield ("policy", "generation", "refit_canary"), without_canary(generation.backend)


def without_canary(backend: str) -> str:
    """The error for a config without the canary, which an engine without `HELD_DIGESTS` requires."""
    return (
        f"the engine {backend!r} requires the canary: its fingerprint covers the weights that it received, not the tensors "
        f"that it computes with (it does not have the capability {HELD_DIGESTS!r}). Keep refit_canary: true, and do not "
        "change logits."
    )
