"""What verifies that an engine computes with the weights it was sent: the digests of its tensors, and the canary."""

from __future__ import annotations

from collections.abc import Collection

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import GenerationConfig
from rl_core.plugins.capabilities import Capability


def digests_are_held(capabilities: Collection[str]) -> bool:
    """Whether the fingerprint of an engine with these capabilities covers the tensors that it computes with."""
    return Capability.HELD_WEIGHT_DIGESTS in capabilities


def uses_canary(generation: GenerationConfig) -> bool:
    """Whether the canary is enabled and possible: a policy does not score tokens with an engine's changes of logits."""
    return generation.refit_canary and not generation.logit_changes()


def missing_canary(generation: GenerationConfig, capabilities: Collection[str]) -> Problem | None:
    """The problem of a section without the canary if nothing else covers the tensors that the engine computes with, or None."""
    if digests_are_held(capabilities) or uses_canary(generation):
        return None
    key = ("refit_canary",) if not generation.refit_canary else next(iter(generation.logit_changes()))
    return Problem(
        ("policy", "generation", *key),
        f"the engine {generation.backend!r} requires the canary: its fingerprint covers the weights that it received, not the "
        f"tensors that it computes with (it does not have the capability {str(Capability.HELD_WEIGHT_DIGESTS)!r}). Keep "
        "refit_canary: true, and do not change logits.",
    )
