"""Checks that every weight sync covers what the engine computes with; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import RunConfig
from rl_core.config.written import Path
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry

HELD_DIGESTS = "held_weight_digests"
"""Capability of a generation backend whose weight digests are of the tensors that it computes with."""


def canary_conflicts(run: RunConfig, registry: Registry) -> Iterator[tuple[Path, str]]:
    """A canary that is switched off for an engine that has no other check of what it computes with."""
    generation = run.policy.generation
    if generation is None or generation.refit_canary or is_path(generation.backend):
        return
    known = generation.backend in registry.names(Kind.GENERATION)
    if known and HELD_DIGESTS not in registry.find(Kind.GENERATION, generation.backend).capabilities:
        yield ("policy", "generation", "refit_canary"), without_canary(generation.backend)


def without_canary(backend: str) -> str:
    """Why the canary of an engine without `HELD_DIGESTS` cannot be left out."""
    return (
        f"the engine {backend!r} must be checked by the canary. Its fingerprint covers the weights that arrived and not the "
        f"tensors that it computes with (it lacks the capability {HELD_DIGESTS!r}). Leave refit_canary at true, and logits "
        "unchanged."
    )
